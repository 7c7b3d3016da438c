//! Dates as traces write them.

/// Seconds since the beginning of 1970 of a date such as `2023-11-16 18:15:46.6805900`; a `T` may stand for the space,
/// and a `Z` at the end.
pub(super) fn seconds(text: &str) -> Option<f64> {
    let text = text.trim().trim_end_matches('Z');
    let (day, time) = text.split_once([' ', 'T'])?;
    let mut date = day.splitn(3, '-').map(|part| part.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut clock = time.splitn(3, ':');
    let (hour, minute) = (clock.next()?.parse::<u32>().ok()?, clock.next()?.parse::<u32>().ok()?);
    let second = clock.next()?.parse::<f64>().ok()?;
    let is_date = (1..=12).contains(&month) && (1..=31).contains(&day);
    if !is_date || hour > 23 || minute > 59 || !(0.0..61.0).contains(&second) {
        return None;
    }
    let minutes = (days_since_1970(year, month, day) * 24 + i64::from(hour)) * 60 + i64::from(minute);
    Some(minutes as f64 * 60.0 + second)
}

/// Days by the Gregorian calendar, years counted from March, so that the day that is inserted comes last.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = if month > 2 { year } else { year - 1 };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_seconds_since_1970() {
        assert_eq!(seconds("1970-01-01 00:00:00"), Some(0.0));
        assert_eq!(seconds("2000-03-01T00:00:00Z"), Some(951_868_800.0));
        assert_eq!(seconds("2023-11-16 18:15:46.5"), Some(1_700_158_546.5));
    }

    #[test]
    fn what_is_no_date_is_none() {
        for text in ["", "2023-11-16", "2023-13-16 00:00:00", "2023-11-16 24:00:00", "16.11.2023 18:15:46"] {
            assert_eq!(seconds(text), None, "{text}");
        }
    }
}

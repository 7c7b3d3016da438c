//! Memory that starts at a cache line and is kept between calls.

/// A cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Floats from the start of a cache line on; what they hold at first is whatever was left there.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    lines: Vec<Line>,
}

impl Buffer {
    /// The first `len` floats.
    pub(super) fn floats(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line::default());
        }
        // SAFETY: so many lines are there, and a line is sixteen floats without padding.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), len) }
    }

    /// Where they start.
    pub(super) fn start(&mut self) -> *mut f32 {
        self.lines.as_mut_ptr().cast()
    }
}

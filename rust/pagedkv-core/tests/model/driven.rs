//! Worlds that random commands drive: an object of the crate and its model, side by side.

use std::fmt::Debug;

use super::events::Events;

/// An object of the crate and its model, which are given the same commands.
pub(crate) trait Driven: Sized {
    /// Any four bytes stand for one.
    type Command: Copy + Debug + From<[u8; 4]>;

    /// Runs a command on both; every law after it.
    fn run(&mut self, command: Self::Command);

    /// Brings everything to its end, after which nothing may be left over; odd numbers may do so in another way.
    fn end(&mut self, number: usize);

    /// What was met on the way.
    fn met(&self) -> &Events;

    /// Runs commands, and then to the end.
    fn live(mut self, commands: impl IntoIterator<Item = Self::Command>, number: usize) -> Self {
        commands.into_iter().for_each(|command| self.run(command));
        self.end(number);
        self
    }

    /// Runs the commands that these bytes stand for, and then to the end.
    fn live_bytes(self, bytes: &[u8], number: usize) {
        self.live(bytes.as_chunks().0.iter().map(|&command| command.into()), number);
    }
}

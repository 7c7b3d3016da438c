"""The stages of the check, each a program: its exit status says what came of it, its result goes to the runner."""

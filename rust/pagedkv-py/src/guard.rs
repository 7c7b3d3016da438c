//! One lock around one object of the core, taken once per call; a panic under it poisons the object for good.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use pyo3::prelude::*;

use pagedkv_core::BrokenLaw;

use crate::errors::internal;

const POISONED: &str = "an earlier call found a broken law: this object is not usable any more";

/// An object of the core behind its lock.
pub(crate) struct Guarded<T>(Mutex<T>);

impl<T: Send> Guarded<T> {
    pub(crate) fn new(object: T) -> Self {
        Self(Mutex::new(object))
    }

    /// Runs `call` on the object. Python is not called while the lock is held.
    ///
    /// The order of locks: the interpreter's may be held while this one is taken, never the other way round. Whoever holds
    /// this one lets go of it without the interpreter, so waiting attached cannot deadlock; where `call` takes long,
    /// others should not wait for it: see [`Self::detached`].
    pub(crate) fn with<R>(&self, call: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        settle(catch_unwind(AssertUnwindSafe(|| self.run(call))))
    }

    /// Runs `call` on the object and lets other Python threads run meanwhile, and while it waits for the lock.
    pub(crate) fn detached<R: Send>(&self, py: Python<'_>, call: impl FnOnce(&mut T) -> R + Send) -> PyResult<R> {
        // The lock is given back before the interpreter is waited for.
        settle(py.detach(|| catch_unwind(AssertUnwindSafe(|| self.run(call)))))
    }

    /// `None` for a poisoned object. A panic drops the guard on its way out, which poisons the lock.
    fn run<R>(&self, call: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.0.lock().map(|mut object| call(&mut object)).ok()
    }

    /// Refuses a call that does not take the lock if an earlier one found a broken law.
    pub(crate) fn check_usable(&self) -> PyResult<()> {
        if self.0.is_poisoned() { Err(internal(POISONED)) } else { Ok(()) }
    }

    /// Runs an audit of the object; a law that it finds broken ends the object's life like a panic.
    pub(crate) fn audit(&self, audit: impl FnOnce(&T) -> Result<(), BrokenLaw>) -> PyResult<()> {
        self.with(|object| {
            if let Err(broken) = audit(object) {
                resume_unwind(Box::new(broken.to_string()));
            }
        })
    }
}

fn settle<R>(outcome: std::thread::Result<Option<R>>) -> PyResult<R> {
    match outcome {
        Ok(Some(result)) => Ok(result),
        Ok(None) => Err(internal(POISONED)),
        Err(panic) => Err(internal(panic_text(panic.as_ref()))),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a law is broken")
}

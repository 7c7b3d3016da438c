//! The exceptions, and the one place where the core's errors become them.

use pagedkv_core::Error;
use pyo3::exceptions::{
    PyException, PyLookupError, PyMemoryError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyTuple, PyType};

/// Name and documentation of an exception.
type Kind = (&'static str, &'static str);

const BASE: Kind = ("PagedKVError", "Base of every exception of this package.");
const INVALID: Kind =
    ("InvalidArgumentError", "An argument outside its range: which, what was expected, and what came.");
const NEVER_FITS: Kind = ("NeverFitsError", "A request that even an empty pool could not hold.");
const UNKNOWN: Kind = ("UnknownIdError", "An id or a handle that names nothing (any more).");
const NOT_HELD: Kind = ("NotHeldError", "A block was freed or touched that nobody holds.");
const STATE: Kind =
    ("StateError", "A call that the present state does not allow: a plan out of order, a sequence in flight.");
const UNSUPPORTED: Kind = ("UnsupportedError", "A combination that this version does not have, refused by name.");
const INTERNAL: Kind =
    ("InternalError", "A law of the bookkeeping is broken: a bug of this package. The object is not usable any more.");

struct Exceptions {
    base: Py<PyType>,
    invalid: Py<PyType>,
    never_fits: Py<PyType>,
    unknown: Py<PyType>,
    not_held: Py<PyType>,
    state: Py<PyType>,
    unsupported: Py<PyType>,
    internal: Py<PyType>,
}

impl Exceptions {
    fn new(py: Python<'_>) -> PyResult<Self> {
        let make = |(name, doc): Kind, bases: &[Bound<'_, PyType>]| {
            let namespace = [("__doc__", doc), ("__module__", "pagedkv.exceptions")].into_py_dict(py)?;
            let made = py.get_type::<PyType>().call1((name, PyTuple::new(py, bases)?, namespace))?;
            Ok::<_, PyErr>(made.cast_into::<PyType>()?.unbind())
        };
        let base = make(BASE, &[py.get_type::<PyException>()])?;
        let both = |kind, built_in| make(kind, &[base.bind(py).clone(), built_in]);
        let invalid = both(INVALID, py.get_type::<PyValueError>())?;
        let never_fits = make(NEVER_FITS, &[invalid.bind(py).clone()])?;
        Ok(Self {
            never_fits,
            unknown: both(UNKNOWN, py.get_type::<PyLookupError>())?,
            not_held: both(NOT_HELD, py.get_type::<PyValueError>())?,
            state: both(STATE, py.get_type::<PyRuntimeError>())?,
            unsupported: both(UNSUPPORTED, py.get_type::<PyNotImplementedError>())?,
            internal: both(INTERNAL, py.get_type::<PyRuntimeError>())?,
            invalid,
            base,
        })
    }

    fn get(py: Python<'_>) -> PyResult<&Self> {
        static EXCEPTIONS: PyOnceLock<Exceptions> = PyOnceLock::new();
        EXCEPTIONS.get_or_try_init(py, || Self::new(py))
    }
}

/// Adds the exceptions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let found = Exceptions::get(py)?;
    for ((name, _), exception) in [
        (BASE, &found.base),
        (INVALID, &found.invalid),
        (NEVER_FITS, &found.never_fits),
        (UNKNOWN, &found.unknown),
        (NOT_HELD, &found.not_held),
        (STATE, &found.state),
        (UNSUPPORTED, &found.unsupported),
        (INTERNAL, &found.internal),
    ] {
        module.add(name, exception)?;
    }
    Ok(())
}

/// The exception for an error of the core.
#[expect(clippy::needless_pass_by_value, reason = "map_err hands it over by value")]
pub(crate) fn to_py_err(error: Error) -> PyErr {
    if let Error::OutOfMemory { .. } = error {
        return PyMemoryError::new_err(error.to_string());
    }
    raise(error.to_string(), |found| class_of(&error, found))
}

fn class_of<'a>(error: &Error, found: &'a Exceptions) -> &'a Py<PyType> {
    match error {
        Error::InBatch { error, .. } => class_of(error, found),
        Error::NeverFits { .. } => &found.never_fits,
        Error::UnknownHandle(_)
        | Error::UnknownTransfer(_)
        | Error::UnknownSequence(_)
        | Error::UnknownBlock { .. }
        | Error::UnknownPin(_) => &found.unknown,
        Error::NotHeld(_) => &found.not_held,
        Error::SequenceInFlight(_)
        | Error::RequestInFlight(_)
        | Error::NotFinished { .. }
        | Error::PlanOutOfOrder { .. }
        | Error::PlanNotInFlight(_)
        | Error::TooManyPlans(_)
        | Error::NoPlan
        | Error::UntoldTokens(_)
        | Error::StaleComputedBlocks => &found.state,
        Error::Unsupported(_) => &found.unsupported,
        _ => &found.invalid,
    }
}

/// An argument, or an element of one, that is of the wrong type.
pub(crate) fn wrong_element(argument: &str, expected: &str, found: &str) -> PyErr {
    PyTypeError::new_err(format!("{argument}: expected {expected}, found {found}"))
}

/// A refused argument.
pub(crate) fn invalid(argument: &str, expected: &str, found: &str) -> PyErr {
    raise(format!("{argument}: expected {expected}, found {found}"), |exceptions| &exceptions.invalid)
}

/// Something refused in words of its own.
pub(crate) fn refused(message: &str) -> PyErr {
    raise(message.to_owned(), |exceptions| &exceptions.invalid)
}

/// A combination that this version does not have.
pub(crate) fn unsupported(what: &str) -> PyErr {
    raise(format!("not supported: {what}"), |exceptions| &exceptions.unsupported)
}

/// A broken law.
pub(crate) fn internal(what: &str) -> PyErr {
    raise(what.to_owned(), |exceptions| &exceptions.internal)
}

fn raise(message: String, choose: impl FnOnce(&Exceptions) -> &Py<PyType>) -> PyErr {
    Python::attach(|py| match Exceptions::get(py) {
        Ok(exceptions) => PyErr::from_type(choose(exceptions).bind(py).clone(), message),
        Err(error) => error,
    })
}

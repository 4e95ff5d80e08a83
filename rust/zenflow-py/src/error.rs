//! Core errors as the package's own exceptions (`zenflow.errors`), so that one family is caught by one `except`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use zenflow_core::Error;

static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    let module = CLASSES.get_or_try_init(py, || PyModule::import(py, "zenflow.errors").map(Bound::unbind))?;
    Ok(module.bind(py).getattr(name)?.cast_into::<PyType>()?)
}

fn raise(name: &str, message: String) -> PyErr {
    Python::attach(|py| match class(py, name) {
        Ok(class) => PyErr::from_type(class, message),
        Err(error) => error,
    })
}

/// The exception for a core error.
pub fn to_python(error: &Error) -> PyErr {
    let name = match error {
        Error::InvalidArgument { .. } => "ArgumentError",
        Error::OutOfMemory { .. } => "HostMemoryError",
        Error::Closed => "EngineClosedError",
        Error::Poisoned { .. } => "EngineFailedError",
        Error::Forked { .. } => "ForkedProcessError",
        _ => "ZenFlowError",
    };
    raise(name, error.to_string())
}

/// An `ArgumentError` of the border itself.
pub fn invalid(name: &str, value: impl std::fmt::Display, accepted: &str) -> PyErr {
    raise("ArgumentError", format!("{name} is {value}; accepted: {accepted}"))
}

//! `Pool`: the threads that CPU kernels run on.

use pyo3::prelude::*;
use zenflow_core::isa::Isa;
use zenflow_core::{pool, topology};

use crate::error::{invalid, to_python};

pub fn isa_from(name: Option<&str>) -> PyResult<Isa> {
    let Some(name) = name else { return Ok(Isa::detect()) };
    Isa::available()
        .into_iter()
        .find(|isa| isa.name() == name)
        .ok_or_else(|| invalid("isa", name, &format!("one of {}", crate::isas().join(", "))))
}

/// A pool of threads pinned to cores, and the instruction set its kernels use.
#[pyclass(frozen, module = "zenflow._core")]
pub struct Pool {
    pub inner: pool::Pool,
    pub isa: Isa,
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (cores=None, *, threads=None, pin=true, isa=None))]
    fn new(
        py: Python<'_>,
        cores: Option<Vec<usize>>,
        threads: Option<usize>,
        pin: bool,
        isa: Option<&str>,
    ) -> PyResult<Self> {
        let isa = isa_from(isa)?;
        let cores = cores.unwrap_or_else(topology::all_cores);
        let inner = py
            .detach(|| match threads {
                Some(threads) => pool::Pool::with_threads(threads),
                None => pool::Pool::new(&cores, pin),
            })
            .map_err(|error| to_python(&error))?;
        Ok(Self { inner, isa })
    }

    /// Number of threads.
    #[getter]
    fn threads(&self) -> usize {
        self.inner.threads()
    }

    /// Name of the instruction set.
    #[getter]
    fn isa(&self) -> &'static str {
        self.isa.name()
    }
}

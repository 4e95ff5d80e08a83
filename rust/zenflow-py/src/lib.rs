//! `zenflow._core`: the border between Python and `zenflow-core`. Thin on purpose: arguments are checked and turned
//! into addresses, the GIL is released, errors become exceptions; everything else lives on either side.

// pyo3 hands arguments over by value, and a method has the arguments that its Python face has.
#![allow(clippy::needless_pass_by_value, clippy::too_many_arguments)]

mod adam;
mod dlpack;
mod engine;
mod error;
mod pool;
mod roofline;
mod table;
mod tensor;

use pyo3::prelude::*;
use zenflow_core::isa::Isa;
use zenflow_core::topology;

/// Names of the instruction sets this machine can run, best first.
#[pyfunction]
fn isas() -> Vec<&'static str> {
    Isa::available().iter().map(|isa| isa.name()).collect()
}

/// Logical CPUs this process may use, one a physical core.
#[pyfunction]
fn all_cores() -> Vec<usize> {
    topology::all_cores()
}

/// The cores an engine takes by default: all but one.
#[pyfunction]
fn default_cores() -> Vec<usize> {
    topology::default_cores()
}

/// The compiled core of torch-zenflow.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<pool::Pool>()?;
    module.add_class::<adam::AdamTensors>()?;
    module.add_class::<table::ParameterTable>()?;
    module.add_class::<table::Found>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<engine::HostArray>()?;
    module.add_function(wrap_pyfunction!(adam::grad_stats, module)?)?;
    module.add_function(wrap_pyfunction!(adam::accumulate, module)?)?;
    module.add_function(wrap_pyfunction!(roofline::roofline, module)?)?;
    module.add_function(wrap_pyfunction!(isas, module)?)?;
    module.add_function(wrap_pyfunction!(all_cores, module)?)?;
    module.add_function(wrap_pyfunction!(default_cores, module)?)?;
    Ok(())
}

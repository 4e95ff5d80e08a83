//! The CPU side of torch-zenflow: Adam kernels, gradient accumulation and the update engine.
//!
//! This crate knows nothing of Python or torch. Arrows between its modules go one way:
//! `hyper, isa, dtype <- adam, accumulate, norm, migrate <- bucket <- engine -> ring -> sync`.

pub mod accumulate;
pub mod adam;
pub mod bucket;
pub mod deal;
pub mod doorbell;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod hyper;
pub mod isa;
pub mod memory;
pub mod migrate;
pub mod norm;
pub mod pool;
pub mod process;
pub mod ring;
pub mod roofline;
pub mod sync;
pub mod ticket;
pub mod topology;

mod line;
mod shared;
mod simd;
mod worker;

pub use error::{Error, Result};

//! The messages on the rings: small, `Copy`, and all a side needs to know.

use crate::dtype::Dtype;
use crate::hyper::Hyper;

/// One bucket's work for one step.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    /// Bucket it is for.
    pub bucket: u32,
    /// Gradient slot.
    pub slot: u32,
    /// Weight slot, where anything closes.
    pub upload: Option<u32>,
    /// Dtype of the gradients in the slot.
    pub grad_dtype: Dtype,
    /// Dtype of the new weights.
    pub out_dtype: Dtype,
    /// Hyper-parameters as they were at submission.
    pub hyper: Hyper,
    /// Position among the tickets of its bucket, from 1; set by [`crate::engine::Engine::submit`].
    pub sequence: u64,
}

/// A finished ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Its bucket.
    pub bucket: u32,
    /// Its gradient slot, free again.
    pub slot: u32,
    /// Its weight slot, now holding the new weights.
    pub upload: Option<u32>,
    /// The step was void: nothing was changed.
    pub void: bool,
}

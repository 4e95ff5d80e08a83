//! What the worker works on: the host state of each parameter, cut into buckets of segments.
//!
//! A parameter's master weight and moments lie in one piece each, row after row, so that a checkpoint can look at
//! them where they are. A *segment* is one stripe of one parameter (a run of its rows); a *bucket* is a run of
//! segments that travel together: one slot of gradients down, one slot of weights up, one ticket on the ring.
//!
//! Each segment carries its own three scalars: `k`, how often its moments were updated, and the pending movement
//! ([`Pending`]). They are advanced here and nowhere else, when the gradient is at hand, so no part of them can
//! run ahead of the moments, and a segment without a gradient stays as it is.

use std::ops::Range;
use std::sync::Arc;

use crate::adam::{Entry, Job, Moments, Span, WeightFormat, BLOCK};
use crate::deal::Deal;
use crate::dtype::{Dtype, StateDtype};
use crate::error::{Error, Result};
use crate::hyper::{Hyper, Pending, Scalars};
use crate::line::{piece_len, Line};
use crate::memory::{HostBuffer, ALIGNMENT};
use crate::pool::Pool;

/// Elements at whose multiples segments begin in a slot: the 64 bytes of a cache line in 16-bit numbers, so that the
/// kernel's streaming stores begin with a line.
pub const SEGMENT_ALIGNMENT: usize = 32;

/// The state of one parameter: fp32 master weight, `exp_avg` and `exp_avg_sq` in their format, and that format's
/// scales, one after the other in one mapping, since the system bounds the number of those. 12 bytes an element in
/// float32, 8 in bfloat16, 6 and 1/32 in 8 bits.
#[derive(Debug)]
pub struct HostState {
    memory: HostBuffer,
    numel: usize,
    dtype: StateDtype,
    /// Bytes from one array to the next: of the master, and of a moment.
    strides: [usize; 2],
}

impl HostState {
    /// Zero state for `numel` elements.
    ///
    /// Forked children don't get it: their copy would cost the parent a copy of every page that it writes. Nothing in
    /// a child reaches it, since every use of the engine there is refused first.
    pub fn new(numel: usize, dtype: StateDtype) -> Result<Self> {
        let too_many = || Error::invalid("numel", numel, "a number of elements whose bytes can be addressed");
        let aligned = |size: usize| {
            let bytes = numel.checked_mul(size)?.checked_next_multiple_of(ALIGNMENT)?;
            bytes.checked_add(stagger(bytes))
        };
        let sizes = || {
            let (master, moment) = (aligned(4)?, aligned(dtype.size())?);
            let bytes = moment.checked_mul(2)?.checked_add(master)?.checked_add(4 * dtype.scales(numel))?;
            Some(([master, moment], bytes))
        };
        let (strides, bytes) = sizes().ok_or_else(too_many)?;
        let mut memory = HostBuffer::new(bytes, "an fp32 master weight with its exp_avg and exp_avg_sq")?;
        memory.withhold_from_children();
        Ok(Self { memory, numel, dtype, strides })
    }

    /// Elements of each array.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Format of the moments.
    #[must_use]
    pub fn dtype(&self) -> StateDtype {
        self.dtype
    }

    /// The memory of all arrays.
    #[must_use]
    pub fn memory(&self) -> &HostBuffer {
        &self.memory
    }

    /// First element of the master weight.
    #[must_use]
    pub fn master(&self) -> *mut f32 {
        self.memory.as_ptr().cast()
    }

    /// Both moments.
    #[must_use]
    pub fn moments(&self) -> Moments {
        let [master, moment] = self.strides;
        let at = |bytes: usize| self.memory.as_ptr().wrapping_add(bytes);
        Moments {
            exp_avg: at(master),
            exp_avg_sq: at(master + moment),
            scales: at(master + 2 * moment).cast(),
            dtype: self.dtype,
        }
    }

    /// Elements `start..start + len` as a kernel takes them, without gradient and output.
    #[must_use]
    pub fn span(&self, start: usize, len: usize) -> Span {
        let Moments { exp_avg, exp_avg_sq, scales, dtype } = self.moments();
        let whole = Span {
            master: self.master().cast(),
            exp_avg,
            exp_avg_sq,
            scales,
            state_dtype: dtype,
            len: self.numel,
            ..Span::default()
        };
        whole.slice(start, len)
    }

    /// Has the pages of `len` elements from `start` on, in each array, come to the calling thread's NUMA node, if they
    /// aren't there yet. For elements that no ticket is under way for.
    fn touch(&self, start: usize, len: usize) {
        let ([master, moment], size) = (self.strides, self.dtype.size());
        for (array, size) in [(0, 4), (master, size), (master + moment, size)] {
            let first = array + size * start;
            self.memory.touch(first..first + size * len);
        }
    }
}

/// Bytes between one array and the next. Arrays of a power-of-two size would otherwise lie a power of two apart, and
/// their streams fight for the same cache sets and memory banks: another page, another set, another line.
fn stagger(bytes: usize) -> usize {
    match bytes {
        0..0x1000 => 0,
        0x1000..0x10_0000 => 0x400 + ALIGNMENT,
        _ => 0x1_0000 + 0x400 + ALIGNMENT,
    }
}

/// What a ticket asks of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Action {
    /// No gradient this step: nothing of it changes.
    Absent = 0,
    /// The gradient enters the moments.
    Moments = 1,
    /// The gradient enters the moments and the weight moves by all that is pending.
    Close = 2,
}

impl Action {
    /// The action with this number.
    #[must_use]
    pub fn from_u8(value: u8) -> Option<Self> {
        match value {
            0 => Some(Self::Absent),
            1 => Some(Self::Moments),
            2 => Some(Self::Close),
            _ => None,
        }
    }
}

/// The counters of one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Updates of the moments so far.
    pub k: u64,
    /// What the weight still has to move.
    pub pending: Pending,
}

/// One stripe of one parameter.
#[derive(Clone, Debug)]
pub struct Segment {
    /// State it is a part of.
    pub state: Arc<HostState>,
    /// First element within the parameter.
    pub start: usize,
    /// Elements.
    pub len: usize,
    /// First element within the bucket's slots.
    pub offset: usize,
    /// Its counters.
    pub progress: Progress,
}

/// A run of segments with one set of hyper-parameters.
#[derive(Debug, Default)]
pub struct Bucket {
    segments: Vec<Segment>,
    numel: usize,
}

/// Where a ticket's gradients come from and its new weights go.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// First byte of the gradients.
    pub grad: *const u8,
    /// Their dtype.
    pub grad_dtype: Dtype,
    /// First byte of the new weights; null where none are wanted.
    pub out: *mut u8,
    /// Their dtype.
    pub out_dtype: Dtype,
}

impl Bucket {
    /// A bucket of `(state, start, len)` segments.
    ///
    /// In the bucket's slots each begins at a multiple of [`SEGMENT_ALIGNMENT`] elements, behind a gap where need be.
    pub fn new(parts: Vec<(Arc<HostState>, usize, usize)>) -> Result<Self> {
        let mut bucket = Self::default();
        for (state, start, len) in parts {
            if start.checked_add(len).is_none_or(|stop| stop > state.numel()) {
                return Err(Error::invalid(
                    "segments",
                    format!("{start}..{start}+{len}"),
                    "ranges inside their parameter",
                ));
            }
            if state.dtype() == StateDtype::Int8 && start % BLOCK != 0 {
                return Err(Error::invalid(
                    "segments",
                    format!("{start}..{start}+{len}"),
                    "ranges that start at a multiple of 256 elements, where the moments have 8 bits",
                ));
            }
            let offset = bucket.numel.next_multiple_of(SEGMENT_ALIGNMENT);
            bucket.segments.push(Segment { state, start, len, offset, progress: Progress::default() });
            bucket.numel = offset + len;
        }
        Ok(bucket)
    }

    /// Elements of a slot for all segments, the gaps between them included.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// Commits the states' pages, dealt to the threads of `pool` as the bucket's work will be, in pieces of `chunk`
    /// elements at most: so each page comes to the NUMA node of the threads that stream through it.
    pub fn first_touch(&self, pool: &Pool, chunk: usize) {
        let lens = || self.segments.iter().map(|segment| segment.len);
        let line = Line::new(lens(), piece_len(lens().sum(), pool.threads(), chunk));
        let touch = |index: usize, range: Range<usize>| {
            let segment: &Segment = &self.segments[index];
            segment.state.touch(segment.start + range.start, range.len());
        };
        Deal::new(pool.shares(), line.pieces()).run(pool, || false, |piece| line.piece(piece, touch));
    }

    /// Number of segments.
    #[must_use]
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// True without segments.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// The counters of every segment.
    #[must_use]
    pub fn progress(&self) -> Vec<Progress> {
        self.segments.iter().map(|segment| segment.progress).collect()
    }

    /// Sets the counters of every segment, as a checkpoint had them.
    pub fn set_progress(&mut self, progress: &[Progress]) -> Result<()> {
        if progress.len() != self.segments.len() {
            return Err(Error::invalid("progress", progress.len(), "one entry a segment"));
        }
        for (segment, &new) in self.segments.iter_mut().zip(progress) {
            segment.progress = new;
        }
        Ok(())
    }

    /// Refuses formats of gradients and new weights that don't go with the states of what closes.
    pub fn check(&self, actions: &[Action], grad_dtype: Dtype, out_dtype: Dtype) -> Result<()> {
        for (segment, &action) in self.segments.iter().zip(actions) {
            if action == Action::Close {
                let span = Span {
                    grad_dtype: grad_dtype.into(),
                    weight: WeightFormat::Master(out_dtype),
                    out: std::ptr::dangling_mut(),
                    ..segment.state.span(0, 0)
                };
                span.check(Entry::Move)?;
            }
        }
        Ok(())
    }

    /// Advances the counters by one step and returns the kernel jobs that make it so.
    ///
    /// The jobs' pointers are valid as long as the bucket lives and `transfer` covers its elements.
    pub fn advance(
        &mut self,
        actions: &[Action],
        hyper: &Hyper,
        grad_scale: f64,
        transfer: &Transfer,
    ) -> Vec<Job> {
        let mut jobs = Vec::with_capacity(self.segments.len());
        for (segment, &action) in self.segments.iter_mut().zip(actions) {
            if action == Action::Absent {
                continue;
            }
            let progress = &mut segment.progress;
            progress.k += 1;
            progress.pending.advance(hyper.lr, hyper.weight_decay);
            let (entry, scalars) = match action {
                Action::Close => {
                    (Entry::Move, Scalars::close(hyper, progress.k, progress.pending, grad_scale))
                }
                _ => (Entry::Moments, Scalars::moments(hyper, progress.k, grad_scale)),
            };
            let out = if entry == Entry::Move {
                progress.pending = Pending::default();
                transfer.out.wrapping_add(segment.offset * transfer.out_dtype.size())
            } else {
                std::ptr::null_mut()
            };
            let grad = transfer.grad.wrapping_add(segment.offset * transfer.grad_dtype.size());
            let span = Span {
                grad,
                grad_dtype: transfer.grad_dtype.into(),
                out,
                weight: WeightFormat::Master(transfer.out_dtype),
                ..segment.state.span(segment.start, segment.len)
            };
            jobs.push(Job { span, scalars, entry });
        }
        jobs
    }
}

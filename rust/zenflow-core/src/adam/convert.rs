//! Moments to and from float32, for checkpoints and for columns that change their owner.
//!
//! To float32 is exact in every format. From float32 rounds to nearest, which gives back what once came from there:
//! a state survives a checkpoint bit for bit. (8-bit codes may come out other than they were, but not what they stand
//! for.) A float32 state becomes a leaner one by rounding, once.

// Every access says that it may be unaligned.
#![allow(clippy::cast_ptr_alignment)]

use half::bf16;

use super::codes::{first_of, nearest_first, nearest_second, scale, second_of, BLOCK};
use crate::dtype::StateDtype;

/// Both moments of a run of elements that begins a block.
#[derive(Clone, Copy, Debug)]
pub struct Moments {
    /// First moment.
    pub exp_avg: *mut u8,
    /// Second moment.
    pub exp_avg_sq: *mut u8,
    /// Two scales a block, first and second moment's; unused but in [`StateDtype::Int8`].
    pub scales: *mut f32,
    /// The format.
    pub dtype: StateDtype,
}

impl Moments {
    /// Element `at` of both moments.
    ///
    /// # Safety
    ///
    /// It is readable in both, and so are the scales of its block.
    #[must_use]
    pub unsafe fn get(&self, at: usize) -> [f32; 2] {
        let arrays = [self.exp_avg, self.exp_avg_sq];
        // SAFETY: the caller vouches for the element and its block's scales, whatever their alignment.
        unsafe {
            match self.dtype {
                StateDtype::F32 => arrays.map(|x| x.cast::<f32>().add(at).read_unaligned()),
                StateDtype::Bf16 => {
                    arrays.map(|x| bf16::from_bits(x.cast::<u16>().add(at).read_unaligned()).to_f32())
                }
                StateDtype::Int8 => {
                    let scales = self.scales.add(at / BLOCK * 2);
                    [
                        first_of(self.exp_avg.add(at).read(), scales.read_unaligned()),
                        second_of(self.exp_avg_sq.add(at).read(), scales.add(1).read_unaligned()),
                    ]
                }
            }
        }
    }

    /// Writes both moments as float32.
    ///
    /// # Panics
    ///
    /// Where the slices aren't of one length.
    ///
    /// # Safety
    ///
    /// Both moments are readable for as many elements, and so are the scales of their blocks.
    pub unsafe fn read(&self, exp_avg: &mut [f32], exp_avg_sq: &mut [f32]) {
        assert_eq!(exp_avg.len(), exp_avg_sq.len(), "two moments of one length");
        for (at, (first, second)) in exp_avg.iter_mut().zip(exp_avg_sq).enumerate() {
            // SAFETY: `at` is below their length.
            [*first, *second] = unsafe { self.get(at) };
        }
    }

    /// Takes both moments from float32.
    ///
    /// # Panics
    ///
    /// Where the slices aren't of one length.
    ///
    /// # Safety
    ///
    /// As for [`read`](Self::read), and writable.
    pub unsafe fn write(&self, exp_avg: &[f32], exp_avg_sq: &[f32]) {
        assert_eq!(exp_avg.len(), exp_avg_sq.len(), "two moments of one length");
        for (block, (first, second)) in exp_avg.chunks(BLOCK).zip(exp_avg_sq.chunks(BLOCK)).enumerate() {
            // SAFETY: the block lies within what the caller vouches for.
            unsafe { self.write_block(block, first, second) };
        }
    }

    unsafe fn write_block(&self, block: usize, first: &[f32], second: &[f32]) {
        let start = block * BLOCK;
        let pairs = [(self.exp_avg, first), (self.exp_avg_sq, second)];
        // SAFETY: the caller vouches for the block and its scales, whatever their alignment.
        unsafe {
            match self.dtype {
                StateDtype::F32 => {
                    for (to, from) in pairs {
                        for (i, &x) in from.iter().enumerate() {
                            to.cast::<f32>().add(start + i).write_unaligned(x);
                        }
                    }
                }
                StateDtype::Bf16 => {
                    for (to, from) in pairs {
                        for (i, &x) in from.iter().enumerate() {
                            to.cast::<u16>().add(start + i).write_unaligned(bf16::from_f32(x).to_bits());
                        }
                    }
                }
                StateDtype::Int8 => {
                    let nearest: [fn(f32, f32) -> u8; 2] = [nearest_first, nearest_second];
                    for (moment, (to, from)) in pairs.into_iter().enumerate() {
                        let largest = from.iter().fold(0, |most, x| x.abs().to_bits().max(most));
                        let (scale, inverse) = scale(largest);
                        self.scales.add(2 * block + moment).write_unaligned(scale);
                        for (i, &x) in from.iter().enumerate() {
                            to.add(start + i).write(nearest[moment](x, inverse));
                        }
                    }
                }
            }
        }
    }
}

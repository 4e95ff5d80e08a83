//! What the kernel tests share: numbers, one update's arrays, and the stamp that runs a suite on every ISA.
#![allow(dead_code)]

use std::fmt;

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use zenflow_core::adam::{self, Entry, Span, WeightFormat};
use zenflow_core::dtype::Dtype;
use zenflow_core::hyper::{Hyper, Scalars};
use zenflow_core::isa::Isa;

/// Stamps each `fn name(isa: Isa) { .. }` as one test an ISA; those this machine lacks say so and pass.
#[macro_export]
macro_rules! on_every_isa {
    ($($(#[$meta:meta])* fn $name:ident($isa:ident: Isa) $body:block)*) => {
        on_every_isa!(@one avx512 Avx512 $($(#[$meta])* fn $name($isa) $body)*);
        on_every_isa!(@one avx2 Avx2 $($(#[$meta])* fn $name($isa) $body)*);
        on_every_isa!(@one neon Neon $($(#[$meta])* fn $name($isa) $body)*);
        on_every_isa!(@one portable Portable $($(#[$meta])* fn $name($isa) $body)*);
    };
    (@one $module:ident $variant:ident $($(#[$meta:meta])* fn $name:ident($isa:ident) $body:block)*) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $(
                $(#[$meta])*
                #[test]
                fn $name() {
                    let $isa = Isa::$variant;
                    if $isa.is_available() {
                        $body
                    } else {
                        eprintln!("not run: this machine has no {}", $isa);
                    }
                }
            )*
        }
    };
}

/// Checks `property` on `cases` values of `strategy`.
pub fn check<S: Strategy>(cases: u32, strategy: S, property: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
        .run(&strategy, property)
        .unwrap_or_else(|failure| panic!("{failure}"));
}

/// A small generator (xorshift64*), so that arrays of thousands come from one proptest seed.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Uniform in -1 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Any sign, magnitude log-uniform between 1e-7 and 10.
    pub fn wide(&mut self) -> f32 {
        let magnitude = 10f32.powf(4.0 * self.unit() - 3.0);
        if self.bits() & 1 == 0 {
            magnitude
        } else {
            -magnitude
        }
    }

    /// Anything: now and then a special number, subnormal or of any bits at all.
    pub fn wild(&mut self) -> f32 {
        match self.bits() % 16 {
            0 => f32::from_bits(self.bits() as u32),
            1 => f32::from_bits(self.bits() as u32 & 0x807F_FFFF),
            2 => [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1.0]
                [(self.bits() % 8) as usize],
            _ => self.wide(),
        }
    }
}

/// The bytes of `x` in `dtype`.
pub fn encode(dtype: Dtype, x: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => x.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Dtype::Bf16 => x.iter().flat_map(|&x| bf16::from_f32(x).to_ne_bytes()).collect(),
        Dtype::F16 => x.iter().flat_map(|&x| f16::from_f32(x).to_ne_bytes()).collect(),
    }
}

/// The numbers behind bytes in `dtype`.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let two = |b: &[u8]| [b[0], b[1]];
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_ne_bytes(two(b)).to_f32()).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_ne_bytes(two(b)).to_f32()).collect(),
    }
}

/// Bits of numbers, all NaNs made one: which NaN it is differs between machines, that it is one doesn't.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Elements that every array has before and after its own, to show that no kernel writes there.
const GUARD: usize = 70;
const GUARD_BYTE: u8 = 0xA5;

/// Bytes at a chosen misalignment within a page-aligned block, with guards on both sides.
#[derive(Clone)]
pub struct Arena {
    block: Vec<u128>,
    start: usize,
    bytes: usize,
}

impl Arena {
    pub fn new(content: &[u8], shift: usize) -> Self {
        let start = GUARD * 4 + shift;
        let total = start + content.len() + GUARD * 4 + 64;
        let mut arena = Self { block: vec![0; total.div_ceil(16)], start, bytes: content.len() };
        arena.all().fill(GUARD_BYTE);
        // From here on `start` is `shift` bytes past a line.
        arena.start += arena.all().as_ptr().align_offset(64);
        arena.start -= GUARD * 4 % 64;
        let start = arena.start;
        arena.all()[start..start + content.len()].copy_from_slice(content);
        arena
    }

    fn all(&mut self) -> &mut [u8] {
        let (pointer, len) = (self.block.as_mut_ptr().cast::<u8>(), self.block.len() * 16);
        // SAFETY: the block's own bytes; any bytes are valid for both types.
        unsafe { std::slice::from_raw_parts_mut(pointer, len) }
    }

    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        let start = self.start;
        self.all()[start..].as_mut_ptr()
    }

    /// The content, guards checked.
    pub fn content(&mut self) -> &[u8] {
        let (start, stop) = (self.start, self.start + self.bytes);
        let all = self.all();
        assert!(all[..start].iter().all(|&b| b == GUARD_BYTE), "written before the array");
        assert!(all[stop..].iter().all(|&b| b == GUARD_BYTE), "written after the array");
        &all[start..stop]
    }
}

/// One update: what it starts from, and where its arrays lie.
#[derive(Clone)]
pub struct Case {
    pub seed: u64,
    pub entry: Entry,
    pub scalars: Scalars,
    pub grad_dtype: Dtype,
    pub out_dtype: Option<Dtype>,
    pub master: Vec<f32>,
    pub exp_avg: Vec<f32>,
    pub exp_avg_sq: Vec<f32>,
    pub grad: Vec<u8>,
    /// Misalignment, in elements, of master, moments, gradient and output.
    pub shifts: [usize; 5],
}

/// What an update leaves: bits of master, moments and output.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub master: Vec<u32>,
    pub exp_avg: Vec<u32>,
    pub exp_avg_sq: Vec<u32>,
    pub out: Vec<u32>,
    pub raw_out: Vec<u8>,
}

/// Without the thousands of numbers, which `seed` and the length bring back.
impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, entry, scalars, grad_dtype, out_dtype, shifts, .. } = self;
        let len = self.exp_avg.len();
        write!(
            f,
            "{len} elements, seed {seed}, {entry:?}, {grad_dtype} -> {out_dtype:?}, {shifts:?}, {scalars:?}"
        )
    }
}

impl Case {
    /// Runs it on `isa`, in pieces that end at `cuts`.
    pub fn run(&self, isa: Isa, cuts: &[usize]) -> Outcome {
        let len = self.exp_avg.len();
        let out_dtype = self.out_dtype.unwrap_or(Dtype::F32);
        let old_out = vec![0x11u8; self.out_dtype.map_or(0, |dtype| len * dtype.size())];
        let [a, b, c, d, e] = self.shifts;
        let mut master = Arena::new(&encode(Dtype::F32, &self.master), a * 4);
        let mut exp_avg = Arena::new(&encode(Dtype::F32, &self.exp_avg), b * 4);
        let mut exp_avg_sq = Arena::new(&encode(Dtype::F32, &self.exp_avg_sq), c * 4);
        let mut grad = Arena::new(&self.grad, d * self.grad_dtype.size());
        let mut out = Arena::new(&old_out, e * out_dtype.size());
        let span = Span {
            master: master.as_mut_ptr(),
            exp_avg: exp_avg.as_mut_ptr(),
            exp_avg_sq: exp_avg_sq.as_mut_ptr(),
            grad: grad.as_mut_ptr(),
            grad_dtype: self.grad_dtype.into(),
            out: if self.out_dtype.is_some() { out.as_mut_ptr() } else { std::ptr::null_mut() },
            weight: WeightFormat::Master(out_dtype),
            len,
            ..Span::default()
        };
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (len + 1)).chain([0, len]).collect();
        cuts.sort_unstable();
        for pair in cuts.windows(2) {
            // SAFETY: the arenas hold `len` elements each, are apart and stay here.
            unsafe { adam::update(isa, self.entry, &self.scalars, &span.slice(pair[0], pair[1] - pair[0])) };
        }
        assert_eq!(grad.content(), self.grad, "the gradient was written");
        Outcome {
            master: bits(&decode(Dtype::F32, master.content())),
            exp_avg: bits(&decode(Dtype::F32, exp_avg.content())),
            exp_avg_sq: bits(&decode(Dtype::F32, exp_avg_sq.content())),
            out: bits(&decode(out_dtype, out.content())),
            raw_out: out.content().to_vec(),
        }
    }
}

pub fn any_entry() -> impl Strategy<Value = Entry> {
    prop::sample::select(vec![Entry::Moments, Entry::Move, Entry::AdamL2])
}

pub fn any_dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL.to_vec())
}

/// The constants of update `k`.
pub fn scalars(hyper: &Hyper, entry: Entry, k: u64, grad_scale: f64) -> Scalars {
    match entry {
        Entry::Moments => Scalars::moments(hyper, k, grad_scale),
        Entry::Move => Scalars::adamw(hyper, k, grad_scale),
        Entry::AdamL2 => Scalars::adam_l2(hyper, k, grad_scale),
    }
}

/// Any update of up to 5,000 elements; `wild` ones have infinities, NaNs and subnormals too.
pub fn any_case(wild: bool) -> impl Strategy<Value = Case> {
    let len = prop_oneof![0usize..100, 0usize..5000];
    let formats = (any_dtype(), prop::option::of(any_dtype()));
    let shifts = prop::array::uniform5(prop_oneof![Just(0usize), 0usize..40]);
    (any_entry(), len, formats, shifts, any::<u64>(), 1u64..2000, -1.5f64..1.5).prop_map(
        move |(entry, len, (grad_dtype, out_dtype), shifts, seed, k, grad_scale)| {
            let mut rng = Rng::new(seed);
            let scalars = scalars(&hyper(), entry, k, grad_scale);
            let mut draw = |tame: fn(&mut Rng) -> f32| -> Vec<f32> {
                (0..len).map(|_| if wild { rng.wild() } else { tame(&mut rng) }).collect()
            };
            let (master, exp_avg, grad) = (draw(Rng::wide), draw(Rng::wide), draw(Rng::wide));
            let exp_avg_sq = draw(|rng| rng.wide().powi(2));
            let grad = encode(grad_dtype, &grad);
            Case { seed, entry, scalars, grad_dtype, out_dtype, master, exp_avg, exp_avg_sq, grad, shifts }
        },
    )
}

/// Hyper-parameters with nothing at a default.
pub fn hyper() -> Hyper {
    Hyper { lr: 3e-3, beta1: 0.87, beta2: 0.993, eps: 1e-7, weight_decay: 0.07 }
}

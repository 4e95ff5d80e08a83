//! A bounded, lock-free ring between one producer and one consumer.
//!
//! Tickets travel from the training thread to the worker through two of these (urgent, background), and
//! completions travel back through a third. Nothing in here waits: a full ring hands the item back and an
//! empty one says `None`; who wants to sleep does so on a [`Signal`](crate::sync::Signal).
//!
//! # The invariant
//!
//! Two counters that only grow (and wrap with `usize`): `tail`, the items ever pushed, written by the
//! producer alone, and `head`, the items ever popped, written by the consumer alone. Item number `i` lies
//! in slot `i mod capacity`, and always
//!
//! ```text
//!     head <= tail <= head + capacity
//! ```
//!
//! Slots `head..tail` belong to the consumer, the other `capacity - (tail - head)` to the producer. A slot
//! changes hands when a counter is stored, with `Release`, and the new owner has it once it has seen that
//! store, with `Acquire`. Each side keeps its own counter in a plain field, and remembers the other's as it
//! last saw it. A remembered counter is old, never wrong: the other side can only have made more room (or
//! more items) since, so one looks again only when the old value leaves nothing to do. In a steady flow
//! that spares most of the traffic of cache lines between the two cores.
//!
//! The capacity is a power of two, so that it divides the range of `usize`: when a counter wraps, slot
//! numbers go on without a seam, and `tail - head` stays right in wrapping arithmetic.

use std::fmt;
use std::mem::MaybeUninit;

use crossbeam_utils::CachePadded;

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Arc, UnsafeCell};

/// Under loom a ring is small, whatever was asked for, so that a model fills it and goes round it.
const MAX_CAPACITY: usize = if cfg!(loom) { 4 } else { 1 << 31 };

/// What the two ends share. The counters stand on cache lines of their own: each is written by one core
/// and read by the other, and would otherwise take its neighbours along.
struct Shared<T> {
    head: CachePadded<AtomicUsize>,
    tail: CachePadded<AtomicUsize>,
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
}

// SAFETY: the slots are the only part that isn't `Sync` by itself. By the module's invariant each slot has
// one owner at a time, and only the owner touches it; ownership moves with a Release store and an Acquire
// load. So a `&Shared` in two threads does no more than move values of `T` between them: `T: Send`.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn slot(&self, number: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.slots[number & (self.slots.len() - 1)]
    }
}

/// The pushing end. There is one, and it can't be cloned.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    /// The true `tail`: nobody else writes it.
    tail: usize,
    /// The consumer's `head` as last seen; never ahead of the true one.
    head_seen: usize,
}

/// The popping end. There is one, and it can't be cloned.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    /// The true `head`: nobody else writes it.
    head: usize,
    /// The producer's `tail` as last seen; never ahead of the true one.
    tail_seen: usize,
}

/// Looks at a ring from any thread without touching its items: "is something waiting?", asked in the
/// middle of other work. Cheap to clone.
pub struct Watch<T> {
    shared: Arc<Shared<T>>,
}

/// A ring for at least `capacity` items, rounded up to a power of two (1 at least).
///
/// # Panics
///
/// If `capacity` is above 2³¹.
#[must_use]
pub fn ring<T: Copy + Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    ring_from(capacity, 0)
}

/// A ring whose counters begin at `first`, so that tests can see them wrap.
fn ring_from<T: Copy + Send>(capacity: usize, first: usize) -> (Producer<T>, Consumer<T>) {
    let wanted = if cfg!(loom) { capacity.min(MAX_CAPACITY) } else { capacity };
    assert!(wanted <= MAX_CAPACITY, "a ring for {capacity} items; at most {MAX_CAPACITY}");
    let capacity = wanted.max(1).next_power_of_two();
    let shared = Arc::new(Shared {
        head: CachePadded::new(AtomicUsize::new(first)),
        tail: CachePadded::new(AtomicUsize::new(first)),
        slots: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
    });
    (
        Producer { shared: Arc::clone(&shared), tail: first, head_seen: first },
        Consumer { shared, head: first, tail_seen: first },
    )
}

impl<T: Copy + Send> Producer<T> {
    /// Appends `item`, or hands it back when the ring is full. Never waits.
    ///
    /// # Errors
    ///
    /// The item itself, when there is no room for it.
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), T> {
        // 1. Slot `tail` is ours if tail - head < capacity. `head_seen <= head`, so when the remembered
        //    counter shows room, there is room.
        if self.tail.wrapping_sub(self.head_seen) == self.capacity() {
            // 2. Acquire, against the consumer's Release in `pop`: its read of the slot we are about to
            //    overwrite happened before. With Relaxed we could overwrite what it is still reading.
            self.head_seen = self.shared.head.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.head_seen) == self.capacity() {
                return Err(item);
            }
        }
        self.shared.slot(self.tail).with_mut(|slot| {
            // SAFETY: by 1 and 2 the slot is outside head..tail, thus the producer's; there is one producer
            // and `&mut self` makes it one call at a time. Overwriting needs no drop, as `T: Copy`.
            unsafe { (*slot).write(item) };
        });
        // 3. Release: the write above is complete for whoever sees the new tail. This is the moment at
        //    which the slot becomes the consumer's, and nothing here touches it any more.
        self.tail = self.tail.wrapping_add(1);
        self.shared.tail.store(self.tail, Ordering::Release);
        Ok(())
    }
}

impl<T> Producer<T> {
    /// Items that the ring holds when full.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared.slots.len()
    }

    /// Items inside at this moment; the consumer may have taken some since.
    #[must_use]
    pub fn len(&self) -> usize {
        // Acquire for the caller's sake: who sees an item gone may conclude that the pop is over.
        self.tail.wrapping_sub(self.shared.head.load(Ordering::Acquire))
    }

    /// Whether the consumer has taken everything. Once true it stays so until the next push.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a push would be handed back. Once false it stays so until the next push.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.len() == self.capacity()
    }
}

impl<T: Copy + Send> Consumer<T> {
    /// Takes the oldest item, or `None` when the ring is empty. Never waits.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        let item = self.peek()?;
        // 3. Release: the read in `peek` is complete before the producer can see the new head, which makes
        //    the slot its own again. With Relaxed it could write into a read under way.
        self.head = self.head.wrapping_add(1);
        self.shared.head.store(self.head, Ordering::Release);
        Some(item)
    }

    /// Copies the oldest item and leaves it in place.
    #[inline]
    pub fn peek(&mut self) -> Option<T> {
        // 1. Slot `head` is ours if head != tail. `tail_seen <= tail`, so when the remembered counter shows
        //    an item, there is one.
        if self.head == self.tail_seen {
            // 2. Acquire, against the producer's Release in `push`: its write of every slot below the tail
            //    we see happened before. With Relaxed we could read a slot before it is written.
            self.tail_seen = self.shared.tail.load(Ordering::Acquire);
            if self.head == self.tail_seen {
                return None;
            }
        }
        // SAFETY: by 1 and 2 the slot lies in head..tail, thus is the consumer's, and was written before
        // the tail that we saw. There is one consumer, and `&mut self` makes it one call at a time. Copying
        // out leaves no second owner of anything, as `T: Copy`.
        Some(self.shared.slot(self.head).with(|slot| unsafe { (*slot).assume_init() }))
    }
}

impl<T> Consumer<T> {
    /// Items that the ring holds when full.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared.slots.len()
    }

    /// Items inside at this moment; the producer may have added some since.
    #[must_use]
    pub fn len(&self) -> usize {
        // Acquire, so that what its producer did before the push is visible to who acts on the answer.
        self.shared.tail.load(Ordering::Acquire).wrapping_sub(self.head)
    }

    /// Whether there is nothing to pop. Once false it stays so until the next pop. One load: cheap enough
    /// to ask at every chunk of other work, or as the test of a [`Signal`](crate::sync::Signal).
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A handle that answers "is something waiting?" in other threads, while this end is busy.
    #[must_use]
    pub fn watch(&self) -> Watch<T> {
        Watch { shared: Arc::clone(&self.shared) }
    }
}

impl<T> Watch<T> {
    /// Whether the ring held nothing when looked at. A hint, for both ends may move meanwhile, and no more
    /// than that: nothing is concluded from it but "go and pop", and the pop does its own Acquire. So both
    /// loads are Relaxed.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let head = self.shared.head.load(Ordering::Relaxed);
        self.shared.tail.load(Ordering::Relaxed) == head
    }
}

impl<T> Clone for Watch<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Producer({} of {})", self.len(), self.capacity())
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Consumer({} of {})", self.len(), self.capacity())
    }
}

impl<T> fmt::Debug for Watch<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch(empty: {})", self.is_empty())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counters_wrap_without_a_seam() {
        for capacity in [1, 2, 8] {
            let (mut producer, mut consumer) = ring_from(capacity, usize::MAX - 4);
            for round in 0..10_usize {
                for i in 0..capacity {
                    assert_eq!(producer.push(round * capacity + i), Ok(()));
                    assert_eq!((producer.len(), consumer.len()), (i + 1, i + 1));
                }
                assert_eq!(producer.push(999), Err(999));
                assert!(producer.is_full() && !consumer.watch().is_empty());
                for i in 0..capacity {
                    assert_eq!(consumer.peek(), Some(round * capacity + i));
                    assert_eq!(consumer.pop(), Some(round * capacity + i));
                }
                assert_eq!((consumer.pop(), consumer.peek()), (None, None));
                assert!(producer.is_empty() && consumer.is_empty() && consumer.watch().is_empty());
            }
        }
    }

    #[test]
    fn counters_have_cache_lines_of_their_own() {
        let shared = &ring::<u8>(1).0.shared;
        let (head, tail) = (&raw const shared.head, &raw const shared.tail);
        assert!(head.addr().abs_diff(tail.addr()) >= 64);
    }

    #[test]
    #[should_panic(expected = "at most 2147483648")]
    fn an_absurd_capacity_is_refused() {
        let _ = ring::<u8>((1 << 31) + 1);
    }
}

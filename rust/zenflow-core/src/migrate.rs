//! Columns that change owner: between a dense row-major matrix and a compact one of some of its columns.
//!
//! `compact[r, j] = dense[r, columns[j]]`, or the other way round. Row by row, so that the dense side, of which whole
//! cache lines travel anyway, is passed over once, in order. A column given twice is gathered twice; scattered,
//! the last wins.

use crate::adam::Moments;
use crate::error::{Error, Result};

/// Copies columns out of `dense` (`rows` x `cols`) into `compact` (`rows` x `columns.len()`).
///
/// # Safety
///
/// `dense` is readable for `rows * cols` floats, `compact` writable for `rows * columns.len()`, both aligned, by
/// nobody else meanwhile; they don't overlap; every column is under `cols`.
pub unsafe fn gather(dense: *const f32, rows: usize, cols: usize, columns: &[u32], compact: *mut f32) {
    for row in 0..rows {
        // SAFETY: row `row` of each matrix lies within what the caller vouches for.
        let (from, to) = unsafe { (dense.add(row * cols), compact.add(row * columns.len())) };
        for (j, &column) in columns.iter().enumerate() {
            // SAFETY: as above, and `column < cols`.
            unsafe { to.add(j).write(from.add(column as usize).read()) };
        }
    }
}

/// Copies columns of both moments, of `rows` x `cols` elements in any format, into compact float32.
///
/// # Safety
///
/// As for [`gather`]; `moments` are readable for `rows * cols` elements.
pub unsafe fn gather_moments(
    moments: &Moments,
    rows: usize,
    cols: usize,
    columns: &[u32],
    exp_avg: *mut f32,
    exp_avg_sq: *mut f32,
) {
    for row in 0..rows {
        for (j, &column) in columns.iter().enumerate() {
            let to = row * columns.len() + j;
            // SAFETY: the element lies within what the caller vouches for, on both sides.
            unsafe {
                let [first, second] = moments.get(row * cols + column as usize);
                exp_avg.add(to).write(first);
                exp_avg_sq.add(to).write(second);
            }
        }
    }
}

/// Copies the columns of `compact` (`rows` x `columns.len()`) to their places in `dense` (`rows` x `cols`).
///
/// # Safety
///
/// As for [`gather`], with the parts of reader and writer exchanged.
pub unsafe fn scatter(compact: *const f32, rows: usize, cols: usize, columns: &[u32], dense: *mut f32) {
    for row in 0..rows {
        // SAFETY: row `row` of each matrix lies within what the caller vouches for.
        let (from, to) = unsafe { (compact.add(row * columns.len()), dense.add(row * cols)) };
        for (j, &column) in columns.iter().enumerate() {
            // SAFETY: as above, and `column < cols`.
            unsafe { to.add(column as usize).write(from.add(j).read()) };
        }
    }
}

/// [`gather`] on slices.
///
/// # Errors
///
/// [`Error::InvalidArgument`] names the slice whose length doesn't fit, or a column that `dense` hasn't; nothing is
/// written then.
pub fn gather_slices(
    dense: &[f32],
    rows: usize,
    cols: usize,
    columns: &[u32],
    compact: &mut [f32],
) -> Result<()> {
    check(dense.len(), rows, cols, columns, compact.len())?;
    // SAFETY: lengths and columns were checked; the borrows keep the slices apart.
    unsafe { gather(dense.as_ptr(), rows, cols, columns, compact.as_mut_ptr()) };
    Ok(())
}

/// [`scatter`] on slices.
///
/// # Errors
///
/// As for [`gather_slices`].
pub fn scatter_slices(
    compact: &[f32],
    rows: usize,
    cols: usize,
    columns: &[u32],
    dense: &mut [f32],
) -> Result<()> {
    check(dense.len(), rows, cols, columns, compact.len())?;
    // SAFETY: lengths and columns were checked; the borrows keep the slices apart.
    unsafe { scatter(compact.as_ptr(), rows, cols, columns, dense.as_mut_ptr()) };
    Ok(())
}

fn check(dense: usize, rows: usize, cols: usize, columns: &[u32], compact: usize) -> Result<()> {
    if rows.checked_mul(cols) != Some(dense) {
        return Err(Error::invalid("dense", format!("{dense} elements long"), "rows * cols elements"));
    }
    if rows.checked_mul(columns.len()) != Some(compact) {
        return Err(Error::invalid(
            "compact",
            format!("{compact} elements long"),
            "rows * columns.len() elements",
        ));
    }
    match columns.iter().find(|&&column| column as usize >= cols) {
        Some(column) => Err(Error::invalid("columns", column, "column numbers under cols")),
        None => Ok(()),
    }
}

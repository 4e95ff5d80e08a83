//! Columns out and back.

use proptest::prelude::*;
use zenflow_core::migrate::{gather_slices, scatter_slices};

proptest! {
    /// Gathered columns are the columns; scattered back they change nothing; scattered anew they change only theirs.
    #[test]
    fn there_and_back(
        rows in 0usize..20,
        (cols, columns) in (1usize..40)
            .prop_flat_map(|cols| (Just(cols), prop::sample::subsequence((0..cols as u32).collect::<Vec<_>>(), 0..=cols)))
            .prop_flat_map(|(cols, columns)| (Just(cols), Just(columns).prop_shuffle())),
    ) {
        let dense: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
        let mut compact = vec![-1.0; rows * columns.len()];
        gather_slices(&dense, rows, cols, &columns, &mut compact).unwrap();
        for (i, &x) in compact.iter().enumerate() {
            let (row, column) = (i / columns.len(), columns[i % columns.len()] as usize);
            prop_assert_eq!(x.to_bits(), dense[row * cols + column].to_bits());
        }
        let mut again = dense.clone();
        scatter_slices(&compact, rows, cols, &columns, &mut again).unwrap();
        prop_assert_eq!(&again, &dense);
        let negative: Vec<f32> = compact.iter().map(|x| -1.0 - x).collect();
        scatter_slices(&negative, rows, cols, &columns, &mut again).unwrap();
        for (i, (&new, &old)) in again.iter().zip(&dense).enumerate() {
            let want = if columns.contains(&((i % cols) as u32)) { -1.0 - old } else { old };
            prop_assert_eq!(new.to_bits(), want.to_bits());
        }
    }
}

#[test]
fn misfits_are_refused_by_name() {
    let (dense, mut compact) = ([0.0; 6], [0.0; 4]);
    let mut refused = |dense: &[f32], rows, cols, columns: &[u32]| {
        gather_slices(dense, rows, cols, columns, &mut compact).map_err(|error| error.to_string())
    };
    assert_eq!(refused(&dense, 2, 3, &[0, 2]), Ok(()));
    for (name, result) in [
        ("dense", refused(&dense[1..], 2, 3, &[0, 2])),
        ("dense", refused(&dense, usize::MAX, 3, &[0, 2])),
        ("compact", refused(&dense, 2, 3, &[0])),
        ("columns", refused(&dense, 2, 3, &[0, 3])),
    ] {
        let message = result.unwrap_err();
        assert!(message.starts_with(&format!("{name} is ")), "{message}");
    }
    let mut dense = [0.0; 6];
    assert!(scatter_slices(&[0.0; 4], 2, 3, &[3, 0], &mut dense).is_err());
}

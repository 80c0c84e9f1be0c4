//! Least squares without negative numbers, for a handful of unknowns. Pure arithmetic.
//!
//! The best solution without negative numbers is the best one without limits for those unknowns
//! that are not 0. With seven unknowns all 128 choices of them can be tried.

/// The `COUNT` numbers, none of them negative, whose products with `rows` come closest to
/// `wanted`; `None` without rows.
pub fn non_negative<const COUNT: usize>(rows: &[[f64; COUNT]], wanted: &[f64]) -> Option<[f64; COUNT]> {
    let scales: [f64; COUNT] = std::array::from_fn(|column| length(rows.iter().map(|row| row[column])));
    let candidates = (0..1_u32 << COUNT).filter_map(|chosen| {
        let columns: Vec<usize> =
            (0..COUNT).filter(|column| chosen >> column & 1 == 1 && scales[*column] > 0.0).collect();
        let solution = solve(normal_equations(rows, wanted, &columns, &scales))?;
        let mut numbers = [0.0; COUNT];
        for (column, number) in columns.into_iter().zip(solution) {
            numbers[column] = number / scales[column];
        }
        numbers.iter().all(|number| *number >= 0.0).then_some(numbers)
    });
    let error = |numbers: &[f64; COUNT]| {
        let products = rows.iter().map(|row| row.iter().zip(numbers).map(|(a, b)| a * b).sum::<f64>());
        length(products.zip(wanted).map(|(product, wanted)| product - wanted))
    };
    candidates.filter(|_| !rows.is_empty()).min_by(|a, b| error(a).total_cmp(&error(b)))
}

fn length(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.map(|number| number * number).sum::<f64>().sqrt()
}

/// The equations of the chosen columns, each scaled to length 1: a row for each, with its right
/// side as the last number.
fn normal_equations<const COUNT: usize>(
    rows: &[[f64; COUNT]],
    wanted: &[f64],
    columns: &[usize],
    scales: &[f64; COUNT],
) -> Vec<Vec<f64>> {
    let scaled = |row: &[f64; COUNT], column: usize| row[column] / scales[column];
    let equation = |&column: &usize| {
        let left = columns
            .iter()
            .map(|&other| rows.iter().map(|row| scaled(row, column) * scaled(row, other)).sum());
        let right = rows.iter().zip(wanted).map(|(row, wanted)| scaled(row, column) * wanted).sum();
        left.chain([right]).collect()
    };
    columns.iter().map(equation).collect()
}

/// Gaussian elimination with the largest pivot first; `None` where two equations say the same.
fn solve(mut equations: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    let count = equations.len();
    for column in 0..count {
        let largest =
            |&a: &usize, &b: &usize| f64::total_cmp(&equations[a][column].abs(), &equations[b][column].abs());
        let pivot = (column..count).max_by(largest)?;
        equations.swap(column, pivot);
        let (above, below) = equations.split_at_mut(column + 1);
        let pivot = &above[column];
        if pivot[column].abs() < 1e-9 {
            return None;
        }
        for equation in below {
            let factor = equation[column] / pivot[column];
            equation.iter_mut().zip(pivot).for_each(|(number, pivot)| *number -= factor * pivot);
        }
    }
    let mut solution = vec![0.0; count];
    for row in (0..count).rev() {
        let known: f64 = (row + 1..count).map(|column| equations[row][column] * solution[column]).sum();
        solution[row] = (equations[row][count] - known) / equations[row][row];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_can_be_solved_exactly_is() {
        let numbers = non_negative(&[[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], &[3.0, 5.0, 7.0]).unwrap();
        assert!((numbers[0] - 3.0).abs() < 1e-9 && (numbers[1] - 2.0).abs() < 1e-9, "{numbers:?}");
    }

    #[test]
    fn a_number_that_would_be_negative_is_0_and_the_others_make_the_best_of_it() {
        // Without a limit: 3 and -1. With one the first is the mean of what is wanted.
        let numbers = non_negative(&[[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], &[3.0, 2.0, 1.0]).unwrap();
        assert_eq!(numbers[1], 0.0);
        assert!((numbers[0] - 2.0).abs() < 1e-9, "{numbers:?}");
    }

    #[test]
    fn columns_that_say_the_same_and_empty_ones_are_no_trouble() {
        let numbers = non_negative(&[[1.0, 2.0, 0.0], [2.0, 4.0, 0.0]], &[2.0, 4.0]).unwrap();
        assert!((numbers[0] + 2.0 * numbers[1] - 2.0).abs() < 1e-9, "{numbers:?}");
        assert_eq!(non_negative::<2>(&[], &[]), None);
    }

    proptest! {
        #[test]
        fn no_step_in_any_direction_comes_closer(
            rows in prop::collection::vec(prop::array::uniform3(0.0..10.0_f64), 4..10),
            wanted in prop::collection::vec(-5.0..20.0_f64, 10),
            direction in prop::array::uniform3(-0.1..0.1_f64),
        ) {
            let error = |numbers: [f64; 3]| -> f64 {
                let product = |row: &[f64; 3]| -> f64 { row.iter().zip(numbers).map(|(a, b)| a * b).sum() };
                rows.iter().zip(&wanted).map(|(row, wanted)| (product(row) - wanted).powi(2)).sum()
            };
            let best = non_negative(&rows, &wanted[..rows.len()]).unwrap();
            let other: [f64; 3] = std::array::from_fn(|index| (best[index] + direction[index]).max(0.0));
            prop_assert!(error(best) <= error(other) + 1e-9);
        }
    }
}

//! The names of visits to memory of another process: which rows of its table each needs, and which visit it is.

/// So many bits name a row of the table.
pub(super) const ROW_BITS: u32 = 17;
const ROW: u64 = (1 << ROW_BITS) - 1;
const INSIDE: u64 = 1 << 63;

/// The name of a visit that needs two rows, with its number.
#[inline]
pub(super) fn name(number: u64, rows: [u32; 2]) -> u64 {
    let [first, second] = rows.map(|row| u64::from(row) & ROW);
    INSIDE | (number << (2 * ROW_BITS)) & !INSIDE | first << ROW_BITS | second
}

/// Whether a visit needs that row.
pub(super) fn needs(visit: u64, row: u32) -> bool {
    let row = u64::from(row);
    visit & INSIDE != 0 && (visit & ROW == row || visit >> ROW_BITS & ROW == row)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [u32; 2] = [3, 70_000];

    #[test]
    fn a_visit_needs_its_rows_and_no_other() {
        for number in [0, 1, u64::MAX] {
            let visit = name(number, ROWS);
            assert!(needs(visit, 3) && needs(visit, 70_000));
            assert!(!needs(visit, 0) && !needs(visit, 4) && !needs(0, 0));
        }
        assert_ne!(name(1, ROWS), name(2, ROWS));
    }
}

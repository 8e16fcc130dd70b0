//! The names of visits to memory of another process: which rows of its table each needs, and which visit it is.

/// So many bits name a row of the table.
pub(super) const ROW_BITS: u32 = 17;
const ROW: u64 = (1 << ROW_BITS) - 1;
const ACTIVE: u64 = 1 << 63;

/// The name of a visit that needs two rows, with its number.
#[inline]
pub(super) fn encode_tag(number: u64, rows: [u32; 2]) -> u64 {
    let [first, second] = rows.map(|row| u64::from(row) & ROW);
    ACTIVE | (number << (2 * ROW_BITS)) & !ACTIVE | first << ROW_BITS | second
}

/// Whether a visit needs that row.
pub(super) fn uses_row(tag: u64, row: u32) -> bool {
    let row = u64::from(row);
    tag & ACTIVE != 0 && (tag & ROW == row || tag >> ROW_BITS & ROW == row)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [u32; 2] = [3, 70_000];

    #[test]
    fn a_visit_needs_its_rows_and_no_other() {
        for number in [0, 1, u64::MAX] {
            let tag = encode_tag(number, ROWS);
            assert!(uses_row(tag, 3) && uses_row(tag, 70_000));
            assert!(!uses_row(tag, 0) && !uses_row(tag, 4) && !uses_row(0, 0));
        }
        assert_ne!(encode_tag(1, ROWS), encode_tag(2, ROWS));
    }
}

//! Tags of direct accesses to another process's memory: the two table rows that an access uses, and
//! its sequence number.

/// Number of bits of a row index.
pub(super) const ROW_BITS: u32 = 17;
const ROW: u64 = (1 << ROW_BITS) - 1;
const ACTIVE: u64 = 1 << 63;

/// The tag of an access that uses two rows; the upper bits of `number` are dropped.
#[inline]
pub(super) fn encode_tag(number: u64, rows: [u32; 2]) -> u64 {
    let [first, second] = rows.map(|row| u64::from(row) & ROW);
    ACTIVE | (number << (2 * ROW_BITS)) & !ACTIVE | first << ROW_BITS | second
}

/// Whether an access uses this row.
pub(super) fn uses_row(tag: u64, row: u32) -> bool {
    let row = u64::from(row);
    tag & ACTIVE != 0 && (tag & ROW == row || tag >> ROW_BITS & ROW == row)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: [u32; 2] = [3, 70_000];

    #[test]
    fn a_tag_matches_its_rows_only() {
        for number in [0, 1, u64::MAX] {
            let tag = encode_tag(number, ROWS);
            assert!(uses_row(tag, 3) && uses_row(tag, 70_000));
            assert!(!uses_row(tag, 0) && !uses_row(tag, 4) && !uses_row(0, 0));
        }
        assert_ne!(encode_tag(1, ROWS), encode_tag(2, ROWS));
    }
}

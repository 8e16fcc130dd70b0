//! Each row of the table of failures: the right status on the right side.
use crate::fixture::cases;
cases!(CASES: );
cases!(ONCE: );

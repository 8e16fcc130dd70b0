//! Many operations of all sorts, over many streams and queue pairs, in order.
use crate::fixture::*;

cases![ONCE:];

//! The checks: their names, what they are about, and where they run.

use warpwire::mem::MemoryKind::{self, Plain, Pool, Vmm};

use super::{Checked, Subject, data, lifetime, processes};

pub(super) type Check = fn(&Subject) -> Checked;

/// How a check is run.
#[derive(Clone, Copy)]
pub(super) enum Run {
    /// In this process.
    Here(Check),
    /// In a process of its own, because it forks.
    Apart(Check),
    /// Not at all, for this reason.
    Waived(&'static str),
}

/// A check on one kind of memory.
#[derive(Clone, Copy)]
pub(super) struct Case {
    check: &'static str,
    pub(super) about: &'static str,
    kind: Option<MemoryKind>,
    pub(super) run: Run,
}

impl Case {
    /// The check's name, and the kind of memory if it is run on several.
    pub(super) fn name(&self) -> String {
        match self.kind {
            Some(kind) => format!("{}_{kind}", self.check),
            None => self.check.to_owned(),
        }
    }

    pub(super) fn is_called(&self, name: &str) -> bool {
        self.check == name || self.name() == name
    }

    pub(super) fn kind(&self) -> MemoryKind {
        self.kind.unwrap_or(Plain)
    }
}

const ALL: &[MemoryKind] = &[Plain, Vmm, Pool];
const OWN: &[MemoryKind] = &[Plain, Vmm];
const ONE: &[MemoryKind] = &[];

const NO_TOKENS: &str =
    "windows take no P2P tokens: drivers with persistent pins have no use for them";
const NO_SESSION: &str = "a window has no session descriptor that could be passed on: each is opened and owned by one process";
const NO_FORCED_PCIE: &str = "windows have no route to force: it concerns platforms whose CPU caches GPU memory, of which none has been at hand";

type Line = (&'static str, &'static [MemoryKind], &'static str, Run);

/// In the order of gdrcopy's own list, each with the name that it has there; what gdrcopy does not check
/// follows.
const CHECKS: &[Line] = &[
    // basic, basic_v2
    (
        "a_window_opens_and_closes",
        ALL,
        "open and close; the range is the one asked for",
        Run::Here(data::opens_and_closes),
    ),
    // basic_v2_forcepci
    (
        "a_window_can_be_forced_over_pcie",
        ONE,
        "mapping over PCIe where a coherent link exists",
        Run::Waived(NO_FORCED_PCIE),
    ),
    // basic_with_tokens
    ("peer_tokens_open_a_window", ONE, "mapping by P2P tokens", Run::Waived(NO_TOKENS)),
    // basic_unaligned_mapping
    (
        "unaligned_ranges_have_windows",
        ALL,
        "any offset and length; freeing a neighbour changes nothing",
        Run::Here(data::unaligned_ranges),
    ),
    // basic_small_buffers_mapping
    (
        "small_neighbours_have_windows_of_their_own",
        ALL,
        "buffers of 8 bytes that share a page",
        Run::Here(data::small_neighbours),
    ),
    // basic_child_thread_pins_buffer
    (
        "threads_open_use_and_close_windows",
        OWN,
        "open in one thread, use in another, close in a third; two at once on one buffer",
        Run::Here(lifetime::across_threads),
    ),
    // data_validation, data_validation_v2
    (
        "the_device_sees_what_the_cpu_wrote",
        ALL,
        "1000 writes through the window, each found by the device's own copy",
        Run::Here(data::device_sees_cpu),
    ),
    (
        "the_cpu_sees_what_the_device_wrote",
        ALL,
        "a kernel's pattern, read through the window",
        Run::Here(data::cpu_sees_device),
    ),
    (
        "odd_offsets_copy_exactly",
        ALL,
        "10 odd offsets, in words and bytes, on the window, the host and both",
        Run::Here(data::odd_offsets),
    ),
    // data_validation_v2_forcepci
    (
        "forced_pcie_windows_hold_the_same_data",
        ONE,
        "data through a window forced over PCIe",
        Run::Waived(NO_FORCED_PCIE),
    ),
    // data_validation_mix_mappings
    (
        "mapping_types_agree",
        ONE,
        "write-combining and cached windows of one buffer show the same",
        Run::Here(data::mapping_types_agree),
    ),
    // invalidation_access_after_gdr_close
    (
        "a_closed_window_faults",
        OWN,
        "an access after closing is a fault",
        Run::Here(processes::closed_window_faults),
    ),
    // invalidation_access_after_free
    (
        "freed_memory_stays_readable",
        ALL,
        "a window shows what was there until it is closed",
        Run::Here(lifetime::after_free),
    ),
    // invalidation_two_mappings
    (
        "freeing_one_leaves_the_other",
        OWN,
        "two buffers with windows; one is freed",
        Run::Here(lifetime::two_windows),
    ),
    // invalidation_fork_access_after_free
    (
        "a_stale_window_never_shows_another_process",
        OWN,
        "another process takes memory after ours was freed",
        Run::Here(processes::stale_window),
    ),
    // invalidation_fork_after_gdr_map
    (
        "a_forked_child_cannot_touch_the_window",
        OWN,
        "the child faults, the parent goes on",
        Run::Apart(processes::fork_and_touch),
    ),
    // invalidation_fork_child_gdr_map_parent
    (
        "a_forked_child_cannot_open_a_window",
        OWN,
        "the child is refused its parent's memory",
        Run::Apart(processes::fork_and_open),
    ),
    // invalidation_fork_map_and_free
    (
        "a_forked_childs_free_leaves_the_window",
        OWN,
        "the child frees, the parent's window is unharmed",
        Run::Apart(processes::fork_and_free),
    ),
    // invalidation_unix_sock_shared_fd_gdr_pin_buffer
    (
        "a_passed_descriptor_cannot_pin",
        ONE,
        "pinning by another process's session",
        Run::Waived(NO_SESSION),
    ),
    // invalidation_unix_sock_shared_fd_gdr_map
    (
        "a_passed_descriptor_cannot_map",
        ONE,
        "mapping by another process's session",
        Run::Waived(NO_SESSION),
    ),
    // invalidation_fork_child_gdr_pin_parent_with_tokens
    (
        "a_child_cannot_use_its_parents_tokens",
        ONE,
        "pinning by another process's tokens",
        Run::Waived(NO_TOKENS),
    ),
    // attributes_sanity
    (
        "a_window_says_how_it_came_to_be",
        ONE,
        "its path and mapping type; a reason for each path refused",
        Run::Here(data::says_how),
    ),
    // leakage_pin_pages_fork
    (
        "a_killed_process_leaves_nothing_behind",
        OWN,
        "device memory comes back after a process with windows was killed",
        Run::Here(processes::killed_with_windows),
    ),
    (
        "ten_thousand_windows_leave_nothing_behind",
        ONE,
        "from 8 threads: no descriptor and no mapping is left",
        Run::Here(lifetime::ten_thousand),
    ),
    (
        "every_routine_copies_exactly",
        ONE,
        "each sort of the processor's instructions, at many offsets and lengths",
        Run::Here(data::every_routine),
    ),
    (
        "the_best_way_copies_exactly",
        ALL,
        "the library's choice, from 1 byte to 4 MiB, both ways",
        Run::Here(data::best_way),
    ),
    (
        "single_words_are_whole",
        ONE,
        "words and atomics through the window",
        Run::Here(data::single_words),
    ),
    (
        "a_running_kernel_hears_the_cpu",
        OWN,
        "a kernel that polls device memory answers every write",
        Run::Here(data::running_kernel),
    ),
    (
        "wrong_ranges_are_refused",
        ONE,
        "empty, too long, past the end, host memory, freed memory: an error each",
        Run::Here(data::wrong_ranges),
    ),
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (check, kinds, about, run) in CHECKS {
        let case = |kind| Case { check, about, kind, run: *run };
        match kinds.is_empty() {
            true => cases.push(case(None)),
            false => cases.extend(kinds.iter().map(|kind| case(Some(*kind)))),
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<String> = cases().iter().map(Case::name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(count >= 37, "gdrcopy has 37, this has {count}");
    }
}

//! The lock with real threads; `tests/loom_sync.rs` explores every interleaving of a few.
#![allow(clippy::unwrap_used)]

use super::BiasedMutex;
use super::primitives::MAX_BIAS_STREAK;
use std::sync::{Arc, mpsc};
use std::thread;

fn is_owned<T>(lock: &BiasedMutex<T>) -> bool {
    !format!("{lock:?}").contains("owner: 0")
}

/// Locks until this thread becomes the owner: at most `MAX_BIAS_STREAK` times.
fn make_owner(lock: &BiasedMutex<u64>) {
    for _ in 0..MAX_BIAS_STREAK {
        *lock.lock() += 1;
    }
    assert!(is_owned(lock));
}

#[test]
fn frequent_locker_becomes_owner_until_another_thread_locks() {
    let lock = Arc::new(BiasedMutex::new(0));
    make_owner(&lock);
    let shared_lock = lock.clone();
    thread::spawn(move || *shared_lock.lock() += 1).join().unwrap();
    assert!(!is_owned(&lock));
    let before = *lock.lock();
    assert_eq!(before, u64::from(MAX_BIAS_STREAK) + 1);
    // Each revocation raises the streak that is needed, up to its bound.
    for _ in 0..10 {
        make_owner(&lock);
        let shared_lock = lock.clone();
        thread::spawn(move || drop(shared_lock.try_lock().unwrap())).join().unwrap();
    }
}

#[test]
fn only_owner_slots_many_threads_become_owners() {
    let lock = Arc::new(BiasedMutex::new(0));
    let lock_often = |lock: Arc<BiasedMutex<u64>>| {
        (0..MAX_BIAS_STREAK).for_each(|_| *lock.lock() += 1);
        is_owned(&lock)
    };
    let owned: Vec<bool> = (0..super::biased::OWNER_SLOTS + 2)
        .map(|_| {
            let lock = lock.clone();
            thread::spawn(move || lock_often(lock)).join().unwrap()
        })
        .collect();
    assert!(owned[..super::biased::OWNER_SLOTS].iter().all(|owned| *owned));
    assert!(owned[super::biased::OWNER_SLOTS..].iter().all(|owned| !owned));
    assert_eq!(*lock.lock(), (super::biased::OWNER_SLOTS as u64 + 2) * u64::from(MAX_BIAS_STREAK));
}

#[test]
fn unbiased_mutex_still_excludes() {
    let lock = BiasedMutex::unbiased(0);
    (0..2 * MAX_BIAS_STREAK).for_each(|_| *lock.lock() += 1);
    assert!(!is_owned(&lock));
    let held = lock.lock();
    assert!(lock.try_lock().is_none());
    assert_eq!(*held, 2 * MAX_BIAS_STREAK);
}

#[test]
fn no_thread_enters_while_the_owner_holds_the_lock() {
    let lock = Arc::new(BiasedMutex::new(0));
    make_owner(&lock);
    let mut guard = lock.lock();
    assert!(lock.try_lock().is_none(), "the lock is not reentrant");
    let (shared_lock, (started_tx, started_rx)) = (lock.clone(), mpsc::channel());
    let waiter = thread::spawn(move || {
        assert!(shared_lock.try_lock().is_none());
        started_tx.send(()).unwrap();
        *shared_lock.lock()
    });
    started_rx.recv().unwrap();
    *guard = 7;
    drop(guard);
    assert_eq!(waiter.join().unwrap(), 7);
}

#[test]
fn fast_and_slow_path_exclude_each_other() {
    const EACH: u64 = 200_000;
    let lock = Arc::new(BiasedMutex::new([0_u64; 2]));
    let add = |guard: &mut [u64; 2]| {
        // Differ if two threads are inside.
        let [first, second] = *guard;
        assert_eq!(first, second);
        *guard = [first + 1, second + 1];
    };
    let frequent_locker = {
        let lock = lock.clone();
        thread::spawn(move || (0..EACH).for_each(|_| add(&mut lock.lock())))
    };
    let others: Vec<_> = (0..2)
        .map(|thread_index| {
            let lock = lock.clone();
            thread::spawn(move || {
                let mut added = 0;
                for pause in 0..2000 {
                    match (thread_index, lock.try_lock()) {
                        (_, Some(mut guard)) => add(&mut guard),
                        (0, None) => add(&mut lock.lock()),
                        _ => continue,
                    }
                    added += 1;
                    (0..pause % 200).for_each(|_| std::hint::spin_loop());
                }
                added
            })
        })
        .collect();
    frequent_locker.join().unwrap();
    let added: u64 = others.into_iter().map(|other| other.join().unwrap()).sum();
    assert_eq!(*lock.lock(), [EACH + added; 2]);
}

//! A lock with real threads; `tests/doors.rs` tries every order of few.
#![allow(clippy::unwrap_used)]

use super::Biased;
use super::parts::LONGEST_STREAK;
use std::sync::{Arc, mpsc};
use std::thread;

fn is_owned<T>(lock: &Biased<T>) -> bool {
    !format!("{lock:?}").contains("owner: 0")
}

/// As often as it may take.
fn own(lock: &Biased<u64>) {
    for _ in 0..LONGEST_STREAK {
        *lock.lock() += 1;
    }
    assert!(is_owned(lock));
}

#[test]
fn whoever_comes_often_owns_it_and_whoever_else_comes_ends_that() {
    let lock = Arc::new(Biased::new(0));
    own(&lock);
    let theirs = lock.clone();
    thread::spawn(move || *theirs.lock() += 1).join().unwrap();
    assert!(!is_owned(&lock));
    let before = *lock.lock();
    assert_eq!(before, u64::from(LONGEST_STREAK) + 1);
    // It takes longer each time, and never for ever.
    for _ in 0..10 {
        own(&lock);
        let theirs = lock.clone();
        thread::spawn(move || drop(theirs.try_lock().unwrap())).join().unwrap();
    }
}

#[test]
fn a_few_threads_may_be_owners_and_the_rest_share() {
    let lock = Arc::new(Biased::new(0));
    let come = |lock: Arc<Biased<u64>>| {
        (0..LONGEST_STREAK).for_each(|_| *lock.lock() += 1);
        is_owned(&lock)
    };
    let owned: Vec<bool> = (0..super::biased::SEATS + 2)
        .map(|_| {
            let lock = lock.clone();
            thread::spawn(move || come(lock)).join().unwrap()
        })
        .collect();
    assert!(owned[..super::biased::SEATS].iter().all(|owned| *owned));
    assert!(owned[super::biased::SEATS..].iter().all(|owned| !owned));
    assert_eq!(*lock.lock(), (super::biased::SEATS as u64 + 2) * u64::from(LONGEST_STREAK));
}

#[test]
fn what_is_never_owned_is_a_lock_all_the_same() {
    let lock = Biased::unowned(0);
    (0..2 * LONGEST_STREAK).for_each(|_| *lock.lock() += 1);
    assert!(!is_owned(&lock));
    let held = lock.lock();
    assert!(lock.try_lock().is_none());
    assert_eq!(*held, 2 * LONGEST_STREAK);
}

#[test]
fn nobody_comes_in_while_the_owner_is_inside() {
    let lock = Arc::new(Biased::new(0));
    own(&lock);
    let mut guard = lock.lock();
    assert!(lock.try_lock().is_none(), "not even itself");
    let (theirs, (tell, told)) = (lock.clone(), mpsc::channel());
    let waits = thread::spawn(move || {
        assert!(theirs.try_lock().is_none());
        tell.send(()).unwrap();
        *theirs.lock()
    });
    told.recv().unwrap();
    *guard = 7;
    drop(guard);
    assert_eq!(waits.join().unwrap(), 7);
}

#[test]
fn owners_and_others_never_meet() {
    const EACH: u64 = 200_000;
    let lock = Arc::new(Biased::new([0_u64; 2]));
    let add = |guard: &mut [u64; 2]| {
        // Torn if two are inside.
        let [first, second] = *guard;
        assert_eq!(first, second);
        *guard = [first + 1, second + 1];
    };
    let one_that_comes_often = {
        let lock = lock.clone();
        thread::spawn(move || (0..EACH).for_each(|_| add(&mut lock.lock())))
    };
    let others: Vec<_> = (0..2)
        .map(|which| {
            let lock = lock.clone();
            thread::spawn(move || {
                let mut added = 0;
                for pause in 0..2000 {
                    match (which, lock.try_lock()) {
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
    one_that_comes_often.join().unwrap();
    let added: u64 = others.into_iter().map(|other| other.join().unwrap()).sum();
    assert_eq!(*lock.lock(), [EACH + added; 2]);
}

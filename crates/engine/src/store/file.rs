//! The spill store on disk: one file, one I/O thread.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use reef_kv::transfer::{EmptyPages, PinnedPages};

use super::format::{SlotFormat, SpillSize};
use super::slot_file::{SlotFile, SpillOpenError};
use super::slots::{Discarded, Slots};
use super::transfer::{Ended, SlotIo, Transfer};
use super::{Spill, SpillDone, SpillError, SpillUsage};
use crate::executor::Waker;

/// Records in the slots of one file. Transfers are done one after the other, in the order they were asked
/// for, by a thread that stages one slot in memory. There are never more transfers than records, nor more
/// records than slots. Dropping it stops the thread after the slot in hand, lets go of all pages and
/// removes the file.
pub struct SpillFile {
    slots: Slots,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the store and its thread share.
#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Told of new work and of the end.
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Transfer>,
    /// The record in the thread's hands.
    running: Option<u64>,
    /// Whether `running` is to be stopped.
    unwanted: bool,
    ended: Vec<Ended>,
    waker: Option<Waker>,
    stop: bool,
}

impl SpillFile {
    /// Makes the file at `path` and starts the thread. A spill file that a killed process left there is
    /// used again, its content is not.
    ///
    /// # Errors
    /// A size out of range, a path that holds something else or is in use, a disk without so much space,
    /// or what the system says.
    pub fn open(path: &Path, size: SpillSize) -> Result<SpillFile, SpillOpenError> {
        // Before the file: a wrong size touches nothing.
        size.slots()?;
        let file = SlotFile::create(path, size.file_bytes)?;
        SpillFile::over(Box::new(file), size, path)
    }

    /// The same over any place for slots; `path` is named in errors.
    pub(super) fn over(
        mut io: Box<dyn SlotIo>,
        size: SpillSize,
        path: &Path,
    ) -> Result<SpillFile, SpillOpenError> {
        let format = SlotFormat::new(size.slot_bytes, SlotFormat::random_epoch());
        let slots = Slots::new(size.slots()?, format.part_bytes());
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let work = move || work(&theirs, io.as_mut(), &format);
        let thread = std::thread::Builder::new().name("reef-spill".to_owned()).spawn(work);
        let thread = thread.map_err(|source| {
            let path = path.display().to_string();
            SpillOpenError::System { path, source }
        })?;
        Ok(SpillFile { slots, shared, thread: Some(thread) })
    }

    fn submit(&self, transfer: Transfer) {
        self.shared.queue().waiting.push_back(transfer);
        self.shared.changed.notify_one();
    }
}

impl Spill for SpillFile {
    fn can_store(&self, bytes: usize) -> bool {
        self.slots.can_store(bytes)
    }

    fn store(&mut self, record: u64, pages: PinnedPages) -> Result<(), SpillError> {
        let slots = self.slots.begin_store(record, pages.bytes())?;
        self.submit(Transfer::store(record, slots, pages));
        Ok(())
    }

    fn load(&mut self, record: u64, pages: EmptyPages) -> Result<(), SpillError> {
        let slots = self.slots.begin_load(record, pages.bytes())?;
        self.submit(Transfer::load(record, slots, pages));
        Ok(())
    }

    fn discard(&mut self, record: u64) {
        if self.slots.discard(record) == Discarded::Gone {
            return;
        }
        let mut queue = self.shared.queue();
        if queue.running == Some(record) {
            queue.unwanted = true;
            return;
        }
        // Not begun, or already over: its pages go now.
        let is_it = |transfer: &Transfer| transfer.record() == record;
        let index = queue.waiting.iter().position(is_it);
        let unbegun = index.and_then(|index| queue.waiting.remove(index));
        let index = queue.ended.iter().position(|ended| ended.record() == record);
        let over = index.map(|index| queue.ended.remove(index));
        drop(queue);
        drop((unbegun, over));
        self.slots.end(record, false);
    }

    fn poll(&mut self) -> Vec<SpillDone> {
        let ended = std::mem::take(&mut self.shared.queue().ended);
        ended.into_iter().filter_map(|ended| ended.settle(&mut self.slots)).collect()
    }

    fn usage(&self) -> SpillUsage {
        self.slots.usage()
    }

    fn set_waker(&mut self, waker: Waker) {
        self.shared.queue().waker = Some(waker);
    }
}

impl Drop for SpillFile {
    fn drop(&mut self) {
        self.shared.queue().stop = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // An error is a panic of the waker, which has been reported.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Nobody panics with the lock in hand.
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next transfer; `None`: it is time to stop.
    fn next(&self) -> Option<Transfer> {
        let mut queue = self.queue();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(transfer) = queue.waiting.pop_front() {
                queue.running = Some(transfer.record());
                queue.unwanted = false;
                return Some(transfer);
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether the transfer in hand is to be stopped.
    fn is_unwanted(&self) -> bool {
        let queue = self.queue();
        queue.unwanted || queue.stop
    }

    fn end(&self, ended: Ended) {
        let mut queue = self.queue();
        queue.running = None;
        queue.ended.push(ended);
        let waker = queue.waker.clone();
        drop(queue);
        if let Some(wake) = waker {
            wake();
        }
    }
}

/// What the thread does until the store is dropped.
fn work(shared: &Shared, io: &mut dyn SlotIo, format: &SlotFormat) {
    let mut buffer = vec![0; format.slot_bytes()];
    while let Some(mut transfer) = shared.next() {
        let begun = Instant::now();
        let mut outcome = Ok(());
        while outcome.is_ok() && !transfer.is_complete() {
            outcome = if shared.is_unwanted() {
                Err(SpillError::Unknown(transfer.record()))
            } else {
                step(&mut transfer, io, format, &mut buffer)
            };
        }
        let elapsed_us = begun.elapsed().as_micros() as u64;
        shared.end(transfer.end(outcome, elapsed_us));
    }
}

/// One step; a panic in it is a failure of this record and of no other.
fn step(
    transfer: &mut Transfer,
    io: &mut dyn SlotIo,
    format: &SlotFormat,
    buffer: &mut [u8],
) -> Result<(), SpillError> {
    let step = AssertUnwindSafe(|| transfer.step(io, format, buffer));
    let panicked = |_| Err(SpillError::System("its thread has panicked".to_owned()));
    catch_unwind(step).unwrap_or_else(panicked)
}

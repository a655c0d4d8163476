//! Sequences of admin commands of the controller itself: the start, the reading of namespaces, queue pairs, events. One job
//! runs at a time, and one command of it.

use zerocopy::FromBytes;

use super::admin_queue::Waiter;
use super::event::{AdminAnswer, SECOND};
use super::life::Life;
use super::pairs::{Pair, has_room_for_shadows};
use super::{Controller, Event, Failure, ListedNamespace, NamespaceChange, Stage};
use crate::admin::{self, Command};
use crate::claims::{ControllerInfo, Namespace, Unserved, claim};
use crate::data::SglSupport;
use crate::memory::DmaMemory;
use crate::queue::{DmaEnded, QueuePair, Restart, Shadow};
use crate::quirks;
use crate::spec::feature::{self, AsyncEvent, Select};
use crate::spec::identify::{
    CommandSet, Descriptors, IdentifyController, IdentifyNamespace, IdentifyNvmController,
};
use crate::spec::log::{self, SanitizeStatus, SmartLog};
use crate::spec::security;
use crate::spec::status::Status;

/// Namespaces that the driver looks at.
const NAMESPACES_MAX: usize = 1024;
/// Time for all commands of a start, in limits of one: a controller with many namespaces must not keep the caller for hours.
const START_LIMITS: u64 = 2;
/// Asynchronous Event Requests at a time.
const ASYNC_REQUESTS: u16 = 4;

/// VS of NVMe 1.1, 1.3 and 2.0.
const V1_1: u32 = 0x0001_0100;
const V1_3: u32 = 0x0001_0300;
const V2_0: u32 = 0x0002_0000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Everything between CSTS.RDY = 1 and the first command of the owner.
    Start,
    /// Reads the namespaces again, after an event.
    Rescan,
    /// Reads a log page of 512 bytes. Its events are reported again from then on.
    ReadLog(u8),
    CreatePair(u16),
    DeletePair(u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    IdentifyController,
    IdentifyNvm,
    RetryDelays,
    Queues,
    WriteCache,
    AsyncEvents,
    KeepAlive,
    Arbitration,
    DoorbellBuffers,
    Locking,
    /// Reads the Changed Namespace List, which clears the event.
    ChangedNamespaces,
    List {
        after: u32,
    },
    /// By position in the list.
    Namespace(usize),
    Descriptors(usize),
    ReadLog(u8),
    CreateCq(u16),
    CreateSq(u16),
    DeleteSq(u16),
    DeleteCq(u16),
}

impl Step {
    /// Whether the job cannot go on without the command.
    const fn is_needed(self) -> bool {
        matches!(
            self,
            Self::IdentifyController
                | Self::Queues
                | Self::List { .. }
                | Self::DeleteSq(_)
                | Self::DeleteCq(_)
        )
    }

    const fn name(self) -> &'static str {
        match self {
            Self::IdentifyController => "Identify Controller",
            Self::IdentifyNvm => "Identify Controller of the NVM command set",
            Self::RetryDelays => "Set Features (Host Behavior Support)",
            Self::Queues => "Set Features (Number of Queues)",
            Self::WriteCache => "Get Features (Volatile Write Cache)",
            Self::AsyncEvents => "Set Features (Asynchronous Event Configuration)",
            Self::KeepAlive => "Set Features (Keep Alive Timer)",
            Self::Arbitration => "Set Features (Arbitration)",
            Self::DoorbellBuffers => "Doorbell Buffer Config",
            Self::Locking => "Security Receive (Level 0 Discovery)",
            Self::ChangedNamespaces => "Get Log Page (Changed Namespace List)",
            Self::List { .. } => "Identify (active namespaces)",
            Self::Namespace(_) => "Identify Namespace",
            Self::Descriptors(_) => "Identify (namespace descriptors)",
            Self::ReadLog(_) => "Get Log Page",
            Self::CreateCq(_) => "Create I/O Completion Queue",
            Self::CreateSq(_) => "Create I/O Submission Queue",
            Self::DeleteSq(_) => "Delete I/O Submission Queue",
            Self::DeleteCq(_) => "Delete I/O Completion Queue",
        }
    }
}

/// The job that runs.
#[derive(Debug)]
pub(super) struct Running {
    job: Job,
    step: Step,
    /// The namespaces that the lists have named.
    listed: Vec<u32>,
    /// The identify data of the namespace whose descriptors are being read. The error is [`Unserved::NotIdentified`] if the
    /// descriptors do not name a better reason: controllers do not identify namespaces of some other command sets.
    raw: Result<Box<IdentifyNamespace>, Unserved>,
    found: Vec<ListedNamespace>,
    /// Why the controller refused to create the job's queue pair.
    refused: Option<Status>,
}

impl Controller {
    pub(super) fn step_name(&self) -> &'static str {
        self.running.as_ref().map_or("none", |running| running.step.name())
    }

    /// The failure of a start that takes too long.
    pub(super) fn start_too_long(&self) -> Failure {
        let (read, listed) = self.running.as_ref().map_or((0, 0), |running| match running.step {
            Step::Namespace(index) | Step::Descriptors(index) => (index, running.listed.len()),
            _ => (0, running.listed.len()),
        });
        let seconds = self.options.admin.saturating_mul(START_LIMITS) / SECOND;
        Failure::StartTooLong { seconds, step: self.step_name(), read, listed }
    }

    /// Begins the start, before all other jobs.
    pub(super) fn begin_start(&mut self, now: u64) {
        self.start_until = now.saturating_add(self.options.admin.saturating_mul(START_LIMITS));
        self.running = None;
        self.jobs.clear();
        self.jobs.push_back(Job::Start);
        self.next_keep_alive = now;
    }

    /// Begins the next job, if none runs.
    pub(super) fn start_jobs(&mut self, now: u64) -> Result<(), Failure> {
        while self.running.is_none() {
            let Some(job) = self.jobs.pop_front() else { return Ok(()) };
            let step = match job {
                Job::Start => Step::IdentifyController,
                Job::Rescan => Step::ChangedNamespaces,
                Job::ReadLog(page) => Step::ReadLog(page),
                Job::CreatePair(qid) => Step::CreateCq(qid),
                Job::DeletePair(qid) => Step::DeleteSq(qid),
            };
            if let Job::CreatePair(qid) = job
                && let Some(pair) = self.pairs.iter_mut().find(|pair| pair.qid() == qid)
                && pair.stage == Stage::Waiting
            {
                pair.stage = Stage::Creating { is_wanted: true };
                self.clear_shadow(qid);
            }
            let running = Running {
                job,
                step,
                listed: Vec::new(),
                raw: Err(Unserved::Inactive),
                found: Vec::new(),
                refused: None,
            };
            self.running = Some(running);
            self.begin_step(Some(step), now)?;
        }
        Ok(())
    }

    /// Sends the command of `step`, or of the first step after it that has one. Without one, the job is over.
    fn begin_step(&mut self, mut step: Option<Step>, now: u64) -> Result<(), Failure> {
        while let Some(next) = step {
            if let Some(running) = &mut self.running {
                running.step = next;
            }
            if let Some(command) = self.command(next)? {
                let sent = self.send(&command, Waiter::Step, now);
                // The queue has more slots than all other commands together may use.
                return if sent { Ok(()) } else { Err(Failure::AdminTimeout(next.name())) };
            }
            step = self.following(next);
        }
        self.finish_job(now);
        Ok(())
    }

    /// The command of a step; `None` if this controller does not need the step.
    fn command(&mut self, step: Step) -> Result<Option<Command>, Failure> {
        let version = self.vs;
        let Some(running) = &self.running else { return Ok(None) };
        let Some(info) = self.info.as_ref().filter(|_| step != Step::IdentifyController) else {
            return Ok(Some(admin::identify_controller()));
        };
        let feature = |id, value| Some(admin::set_feature(id, 0, value, false));
        Ok(match step {
            Step::IdentifyController => None,
            Step::IdentifyNvm => (version >= V2_0).then(admin::identify_nvm_controller),
            Step::RetryDelays => (info.retry_delays != [0; 3]).then(admin::enable_retry_delays),
            Step::Queues => feature(feature::NUMBER_OF_QUEUES, feature::queue_counts(self.options.pairs)),
            Step::WriteCache => info
                .has_write_cache
                .then(|| admin::get_feature(feature::VOLATILE_WRITE_CACHE, 0, Select::Current, 0)),
            Step::AsyncEvents => feature(
                feature::ASYNC_EVENT_CONFIGURATION,
                info.async_events & !feature::EVENT_ANA | feature::EVENT_HEALTH,
            ),
            Step::KeepAlive if self.options.keep_alive == 0 || info.keep_alive_ms == 0 => None,
            Step::KeepAlive => {
                let ms = (self.options.keep_alive / 1_000_000).max(info.keep_alive_ms);
                feature(feature::KEEP_ALIVE_TIMER, u32::try_from(ms).unwrap_or(u32::MAX))
            }
            Step::Arbitration => {
                let value = |set: feature::Arbitration| set.value(self.caps.has_weights);
                self.options.arbitration.and_then(|set| feature(feature::ARBITRATION, value(set)))
            }
            // Without, doorbells are registers.
            Step::DoorbellBuffers if info.supported.doorbell_buffer && self.has_room_for_shadows() => {
                Some(self.doorbell_buffers()?)
            }
            Step::DoorbellBuffers => None,
            Step::Locking => info.supported.security.then(admin::level_0_discovery),
            Step::ChangedNamespaces => {
                Some(admin::get_log(log::CHANGED_NAMESPACES, u32::MAX, 0, 4096, false))
            }
            Step::List { .. } if version < V1_1 => None,
            Step::List { after } => Some(admin::active_namespaces(after)),
            Step::Namespace(index) => running.listed.get(index).map(|&nsid| admin::identify_namespace(nsid)),
            Step::Descriptors(index) => {
                let has_descriptors = version >= V1_3 && !self.quirks.no_descriptors;
                running
                    .listed
                    .get(index)
                    .filter(|_| has_descriptors)
                    .map(|&nsid| admin::namespace_descriptors(nsid))
            }
            Step::ReadLog(page) => Some(admin::get_log(page, u32::MAX, 0, 512, false)),
            Step::CreateCq(qid) => self
                .new_pair(qid)
                .map(|([_, cq], entries, vector)| admin::create_cq(qid, entries, cq, vector)),
            Step::CreateSq(qid) => {
                self.new_pair(qid).map(|([sq, _], entries, _)| admin::create_sq(qid, entries, sq))
            }
            Step::DeleteSq(qid) => Some(admin::delete_sq(qid)),
            Step::DeleteCq(qid) => Some(admin::delete_cq(qid)),
        })
    }

    /// The addresses of both queues of a pair that is being created, their entries, and the vector.
    fn new_pair(&self, qid: u16) -> Option<([u64; 2], u32, Option<u16>)> {
        let is_new = |pair: &&Pair| pair.qid() == qid && matches!(pair.stage, Stage::Creating { .. });
        let pair = self.pairs.iter().find(is_new)?;
        let queues = pair.shape.layout().queues(pair.memory.iova());
        Some((queues, pair.shape.entries, pair.vector))
    }

    /// Zeroes the shadow doorbells of a pair before the controller creates its queues: an earlier pair of this number, or an
    /// owner that did not quiesce in time, may have left others, for which the controller would fetch entries.
    fn clear_shadow(&self, qid: u16) {
        let Some(Shadow { doorbells, event_indices }) = self.doorbells().shadow else { return };
        let (start, len) = (2 * u64::from(qid) * self.caps.stride, 2 * self.caps.stride);
        for at in (start..start + len).step_by(8) {
            doorbells.store_u64(at as usize, 0);
            event_indices.store_u64(at as usize, 0);
        }
    }

    const fn has_room_for_shadows(&self) -> bool {
        has_room_for_shadows(self.pairs_allowed, self.caps.stride, self.caps.page)
    }

    /// Doorbell Buffer Config with zeroed buffers.
    fn doorbell_buffers(&mut self) -> Result<Command, Failure> {
        let page = self.caps.page;
        if self.shadow.is_none() {
            let buffer = || DmaMemory::new(&self.function, page, page);
            self.shadow = Some([buffer()?, buffer()?]);
        }
        let buffers = self.shadow.as_ref().expect("just allocated");
        for part in buffers.iter().filter_map(|buffer| buffer.part(0, page)) {
            (0..page as usize).step_by(8).for_each(|at| part.store_u64(at, 0));
        }
        Ok(admin::doorbell_buffers(buffers[0].iova(), buffers[1].iova()))
    }

    /// The step after `step`; `None` at the end of the job.
    fn following(&mut self, step: Step) -> Option<Step> {
        Some(match step {
            Step::IdentifyController => Step::IdentifyNvm,
            Step::IdentifyNvm => Step::RetryDelays,
            Step::RetryDelays => Step::Queues,
            Step::Queues => Step::WriteCache,
            Step::WriteCache => Step::AsyncEvents,
            Step::AsyncEvents => Step::KeepAlive,
            Step::KeepAlive => Step::Arbitration,
            Step::Arbitration => Step::DoorbellBuffers,
            Step::DoorbellBuffers => Step::Locking,
            Step::Locking | Step::ChangedNamespaces => Step::List { after: 0 },
            Step::List { .. } => {
                self.list_without_command();
                Step::Namespace(0)
            }
            Step::Namespace(index) => {
                let running = self.running.as_ref()?;
                (index < running.listed.len()).then_some(Step::Descriptors(index))?
            }
            Step::Descriptors(index) => {
                self.add_namespace(index, Descriptors::default());
                Step::Namespace(index + 1)
            }
            Step::CreateCq(qid) => Step::CreateSq(qid),
            Step::DeleteSq(qid) => Step::DeleteCq(qid),
            Step::ReadLog(_) | Step::CreateSq(_) | Step::DeleteCq(_) => return None,
        })
    }

    /// NVMe 1.0 has no list of active namespaces: all IDs up to NN may be.
    fn list_without_command(&mut self) {
        let nn = self.info.as_ref().map_or(0, |info| info.namespaces_max);
        if let Some(running) = self.running.as_mut().filter(|_| self.vs < V1_1) {
            running.listed = (1..=nn).take(NAMESPACES_MAX).collect();
            if nn as usize > NAMESPACES_MAX {
                self.events.push_back(Event::TooManyNamespaces { max: NAMESPACES_MAX });
            }
        }
    }

    /// Takes the answer to the current step, and goes on.
    pub(super) fn finish_step(&mut self, answer: AdminAnswer, now: u64) -> Result<(), Failure> {
        let Some(running) = &self.running else { return Ok(()) };
        let (step, job) = (running.step, running.job);
        let next = match step {
            Step::CreateCq(qid) | Step::CreateSq(qid) if !answer.status.is_success() => {
                self.refuse_pair(qid, answer.status, step)?
            }
            _ => self.absorb(step, job, &answer)?,
        };
        self.begin_step(next, now)
    }

    /// What the answer to a step means; returns the step that follows.
    fn absorb(&mut self, step: Step, job: Job, answer: &AdminAnswer) -> Result<Option<Step>, Failure> {
        let is_success = answer.status.is_success();
        if step.is_needed() && !is_success {
            return Err(Failure::Step { step: step.name(), status: answer.status });
        }
        let data = answer.data.as_slice();
        match step {
            Step::IdentifyController => self.take_identity(data)?,
            Step::IdentifyNvm if is_success => {
                let raw = IdentifyNvmController::read_from_bytes(data).ok();
                if let (Some(info), Some(raw)) = (&mut self.info, raw) {
                    info.add_limits(&raw, self.page_min);
                }
            }
            Step::Queues => self.take_queues(answer.result)?,
            Step::WriteCache if is_success => {
                if let Some(info) = &mut self.info {
                    info.has_write_cache = answer.result & 1 != 0;
                }
            }
            Step::AsyncEvents => {
                let most = self.info.as_ref().map_or(1, |info| info.async_events_max);
                self.async_requests = most.min(ASYNC_REQUESTS);
            }
            Step::Arbitration if !is_success => {
                self.events.push_back(Event::NotSet { step: step.name(), status: answer.status });
            }
            Step::DoorbellBuffers => self.is_shadowed = is_success,
            Step::Locking if is_success => {
                if let Some(info) = &mut self.info {
                    info.locking = security::locking(data);
                }
            }
            Step::List { after } => return self.take_list(after, data).map(Some),
            Step::Namespace(_) => {
                self.running.as_mut().expect("a step is of a job").raw = match is_success {
                    true => {
                        IdentifyNamespace::read_from_bytes(data).map(Box::new).map_err(|_| Unserved::Inactive)
                    }
                    false => Err(Unserved::NotIdentified(answer.status)),
                };
            }
            Step::Descriptors(index) => {
                let found = if is_success { Descriptors::decode(data).ok() } else { None };
                self.add_namespace(index, found.unwrap_or_default());
                return Ok(Some(Step::Namespace(index + 1)));
            }
            Step::ReadLog(log::SMART) if is_success => {
                if let Ok(smart) = SmartLog::read_from_bytes(data) {
                    self.events.push_back(Event::Smart(Box::new(smart)));
                }
            }
            Step::ReadLog(log::SANITIZE_STATUS) if is_success => {
                self.events.extend(SanitizeStatus::decode(data).map(Event::Sanitize));
            }
            _ => {}
        }
        debug_assert!(self.running.as_ref().is_some_and(|running| running.job == job));
        Ok(self.following(step))
    }

    fn take_identity(&mut self, data: &[u8]) -> Result<(), Failure> {
        let raw = IdentifyController::read_from_bytes(data)
            .map_err(|_| Failure::Step { step: Step::IdentifyController.name(), status: Status::new(0) })?;
        let firmware = crate::spec::identify::text(&raw.fr);
        self.quirks = quirks::of(self.device.0, self.device.1, &firmware);
        let mut info = ControllerInfo::check(&raw, self.vs, self.caps.page, self.page_min, self.quirks)?;
        // MDTS may have grown with a new firmware: the pairs that are there keep their lists.
        let lists = self.pairs.iter().map(|pair| pair.shape.transfer).min();
        info.transfer_max = info.transfer_max.min(lists.unwrap_or(u64::MAX));
        match &self.info {
            Some(before) if self.was_ready && !before.is_same_device(&info) => {
                Err(Failure::AnotherDevice { before: before.serial.clone(), now: info.serial })
            }
            _ => {
                self.info = Some(info);
                Ok(())
            }
        }
    }

    fn take_queues(&mut self, result: u32) -> Result<(), Failure> {
        let allowed = feature::allowed_pairs(result).min(self.options.pairs);
        let used = self.pairs.iter().map(Pair::qid).max().unwrap_or(0);
        claim(allowed >= used, "NSQA/NCQA", result.into(), "fewer queues than before the reset")?;
        self.pairs_allowed = allowed;
        Ok(())
    }

    /// Adds a list of active namespaces, whose IDs ascend and end with 0 or with the list.
    fn take_list(&mut self, after: u32, data: &[u8]) -> Result<Step, Failure> {
        let running = self.running.as_mut().expect("a step is of a job");
        let ids = data.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id));
        let (mut last, mut count) = (after, 0);
        for nsid in ids.take_while(|&nsid| nsid != 0) {
            let is_valid = nsid > last && nsid < u32::MAX - 1;
            claim(is_valid, "active namespace list", nsid.into(), "namespace IDs do not ascend")?;
            (last, count) = (nsid, count + 1);
            running.listed.push(nsid);
        }
        if running.listed.len() > NAMESPACES_MAX {
            running.listed.truncate(NAMESPACES_MAX);
            self.events.push_back(Event::TooManyNamespaces { max: NAMESPACES_MAX });
            return Ok(Step::Namespace(0));
        }
        Ok(if count == 1024 { Step::List { after: last } } else { Step::Namespace(0) })
    }

    /// Adds a namespace of the list, unless it is not active.
    fn add_namespace(&mut self, index: usize, descriptors: Descriptors) {
        let (Some(running), Some(info)) = (&mut self.running, &self.info) else { return };
        let Some(&nsid) = running.listed.get(index) else { return };
        let raw = std::mem::replace(&mut running.raw, Err(Unserved::Inactive));
        let namespace = match (raw, descriptors.command_set) {
            (Err(Unserved::NotIdentified(_)), Some(other)) if other != CommandSet::Nvm => {
                Err(Unserved::CommandSet(other))
            }
            (raw, _) => raw.and_then(|raw| Namespace::check(nsid, &raw, descriptors, info, self.quirks)),
        };
        if namespace != Err(Unserved::Inactive) {
            running.found.push(ListedNamespace { nsid, namespace });
        }
    }

    /// A pair that cannot be created ends with an event, unless the owner has it already: then the controller has failed.
    fn refuse_pair(&mut self, qid: u16, status: Status, step: Step) -> Result<Option<Step>, Failure> {
        if self.pairs.iter().any(|pair| pair.qid() == qid && pair.is_given_out) {
            return Err(Failure::Step { step: step.name(), status });
        }
        if let Some(running) = &mut self.running {
            running.refused = Some(status);
        }
        // A completion queue without its submission queue goes too: it has the pair's memory.
        Ok(matches!(step, Step::CreateSq(_)).then_some(Step::DeleteCq(qid)))
    }

    /// The last step of the job is over.
    fn finish_job(&mut self, now: u64) {
        let Some(running) = self.running.take() else { return };
        match running.job {
            Job::Start => {
                self.replace_namespaces(running.found);
                self.finish_start(now);
            }
            Job::Rescan => {
                self.replace_namespaces(running.found);
                // Another rescan waits if its cause came after this one began.
                if !self.jobs.contains(&Job::Rescan) {
                    self.events.push_back(Event::Rescanned);
                }
            }
            Job::ReadLog(_) => {}
            Job::CreatePair(qid) => match running.refused {
                Some(status) => {
                    self.pairs.retain(|pair| pair.qid() != qid);
                    self.events.push_back(Event::QueueFailed { qid, status });
                }
                None => self.hand_out(qid),
            },
            Job::DeletePair(qid) => {
                let Some(pair) = self.pairs.iter_mut().find(|pair| pair.qid() == qid) else { return };
                if pair.stage == (Stage::Deleting { again: false }) {
                    return self.forget_pair(qid);
                }
                pair.stage = Stage::Ended;
                self.events.push_back(Event::DmaEnded(DmaEnded::new(qid, self.id)));
            }
        }
    }

    fn finish_start(&mut self, now: u64) {
        self.life = Life::Ready;
        self.ready_since = now;
        if self.was_ready {
            self.events.push_back(Event::Recovered { took: now.saturating_sub(self.reset_since) });
        } else {
            self.was_ready = true;
            self.events.push_back(Event::Ready);
        }
        let waiting = self.pairs.iter().filter(|pair| pair.stage == Stage::Waiting);
        self.jobs.extend(waiting.map(|pair| Job::CreatePair(pair.qid())));
    }

    /// Gives a pair whose queues now exist to its owner, for the first time or again.
    fn hand_out(&mut self, qid: u16) {
        let (doorbells, controller) = (self.doorbells(), self.id);
        let sgl = self.info.as_ref().map_or(SglSupport::None, |info| info.sgl);
        let Some(pair) = self.pairs.iter_mut().find(|pair| pair.qid() == qid) else { return };
        pair.shape.sgl = sgl;
        match pair.stage {
            Stage::Creating { is_wanted: true } => pair.stage = Stage::Live,
            Stage::Creating { is_wanted: false } => {
                pair.stage = Stage::Deleting { again: false };
                return self.jobs.push_back(Job::DeletePair(qid));
            }
            // The pair of this job was deleted before the job began.
            _ => return,
        }
        if pair.is_given_out {
            self.events.push_back(Event::QueueReady(Restart { qid, controller, sgl, doorbells }));
        } else {
            pair.is_given_out = true;
            let created = QueuePair::new(pair.shape.layout(), &pair.memory, &doorbells);
            let created = created.expect("the memory has the layout's length");
            self.events.push_back(Event::QueueCreated(Box::new(created)));
        }
    }

    /// Replaces the namespaces, and reports the differences once the controller was ready.
    fn replace_namespaces(&mut self, found: Vec<ListedNamespace>) {
        let old = std::mem::replace(&mut self.namespaces, found);
        if !self.was_ready {
            return;
        }
        let mut changes = Vec::new();
        for before in &old {
            match self.namespaces.iter().find(|now| now.nsid == before.nsid) {
                None => changes.push(NamespaceChange::Removed(before.nsid)),
                Some(now) if !is_same(before, now) => changes.push(NamespaceChange::Changed(before.nsid)),
                Some(_) => {}
            }
        }
        let is_new = |now: &&ListedNamespace| !old.iter().any(|before| before.nsid == now.nsid);
        changes.extend(self.namespaces.iter().filter(is_new).map(|now| NamespaceChange::Added(now.nsid)));
        if !changes.is_empty() {
            self.events.push_back(Event::NamespacesChanged(changes));
        }
    }

    /// Reports an asynchronous event, and queues what clears it.
    pub(super) fn take_async_event(&mut self, answer: &AdminAnswer) {
        if !answer.status.is_success() {
            // The controller does not take as many requests; the next one would fail too.
            self.async_requests = self.async_requests.saturating_sub(1);
            return;
        }
        let event = AsyncEvent::decode(answer.result);
        self.events.push_back(Event::Async(event));
        if event == AsyncEvent::FirmwareActivation {
            // The controller pauses from now on.
            self.next_watch = 0;
        }
        let job = match event {
            AsyncEvent::NamespacesChanged => Job::Rescan,
            _ => Job::ReadLog(AsyncEvent::log_page(answer.result)),
        };
        if !self.jobs.contains(&job) {
            self.jobs.push_back(job);
        }
    }
}

/// Whether two readings describe the same namespace in the same state; the used blocks do not count.
fn is_same(before: &ListedNamespace, now: &ListedNamespace) -> bool {
    match (&before.namespace, &now.namespace) {
        (Ok(before), Ok(now)) => Namespace { used: now.used, ..before.clone() } == *now,
        (before, now) => before == now,
    }
}

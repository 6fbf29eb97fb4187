//! Faults of kernel threads that access unmapped memory: a frame past the end of its stack, or an
//! invalid pointer.
//!
//! The processor's fault arrives as SIGSEGV or SIGBUS. The handler ends the running coroutine, and
//! leaves a note with the reason. The coroutine returns to the scheduler as if it had completed.
//!
//! Values that the thread held are leaked, not dropped. It must therefore hold nothing that others
//! wait for. A kernel's own code, which makes frames and dereferences pointers, holds nothing like
//! that.
//!
//! Invariant: any other fault goes to the previous handler.

use super::block::Block;
use super::{CURRENT, fault::Cause, stack::STACK_BYTES};
use corosensei::trap::CoroutineTrapHandler;
use std::cell::{Cell, RefCell};

/// The coroutines of an OS thread, and the reason why the last one was ended.
#[derive(Default)]
pub(super) struct Traps {
    coroutines: RefCell<Vec<Trap>>,
    note: Cell<Option<Note>>,
}

/// A coroutine that the handler can end.
#[derive(Clone, Copy)]
pub(super) struct Trap {
    pub(super) handler: CoroutineTrapHandler<()>,
    /// The lowest address of the stack. The guard page is one page from there on.
    pub(super) limit: usize,
}

/// The reason why a coroutine was ended.
#[derive(Clone, Copy)]
enum Note {
    StackOverflow,
    /// There is no memory at the address. None if the processor does not report the address.
    NoMemory(Option<usize>),
}

impl Traps {
    /// Adds a new coroutine.
    pub(super) fn add(&self, trap: Trap) {
        self.coroutines.borrow_mut().push(trap);
    }

    /// Forgets all coroutines, which have been dropped.
    pub(super) fn clear(&self) {
        self.coroutines.borrow_mut().clear();
    }

    /// Returns the reason why the thread's coroutine was ended.
    pub(super) fn cause(&self, block: &Block) -> Cause {
        match self.note.take() {
            Some(Note::StackOverflow) => Cause::StackOverflow { bytes: STACK_BYTES },
            Some(Note::NoMemory(address)) => Cause::NoMemory { place: address.map(|address| block.place(address)) },
            None => unreachable!("only a fault ends a coroutine here"),
        }
    }
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
mod signal {
    use super::*;
    use libc::{SIGBUS, SIGSEGV, c_int, c_void, sigaction, siginfo_t, stack_t, ucontext_t};
    use std::mem::MaybeUninit;
    use std::ptr::{null, null_mut};
    use std::sync::OnceLock;

    /// The bytes of an OS thread's signal stack.
    const SIGNAL_STACK_BYTES: usize = 64 * 1024;

    const SIGNALS: [c_int; 2] = [SIGSEGV, SIGBUS];

    /// The process's previous action for each signal.
    static BEFORE: [OnceLock<sigaction>; 2] = [OnceLock::new(), OnceLock::new()];

    /// The stack on which this OS thread handles signals, if it had none.
    pub(in super::super) struct SignalStack {
        mapped: Option<*mut c_void>,
    }

    impl SignalStack {
        /// Ensures that this thread's faults reach the handler, on a separate stack.
        pub(in super::super) fn new() -> Self {
            listen();
            // SAFETY: the call only queries this thread's signal stack.
            let has_one = unsafe {
                let mut stack = MaybeUninit::<stack_t>::zeroed();
                libc::sigaltstack(null(), stack.as_mut_ptr()) != 0
                    || stack.assume_init().ss_flags & libc::SS_DISABLE == 0
            };
            if has_one {
                return Self { mapped: None };
            }
            let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new mapping. Only this thread's signals use it, until `drop` revokes it.
            let mapped = unsafe {
                let memory = libc::mmap(null_mut(), SIGNAL_STACK_BYTES, access, kind, -1, 0);
                let stack = stack_t { ss_sp: memory, ss_flags: 0, ss_size: SIGNAL_STACK_BYTES };
                (memory != libc::MAP_FAILED && libc::sigaltstack(&stack, null_mut()) == 0).then_some(memory)
            };
            Self { mapped }
        }
    }

    impl Drop for SignalStack {
        fn drop(&mut self) {
            if let Some(memory) = self.mapped {
                let none = stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: SIGNAL_STACK_BYTES };
                // SAFETY: `new` mapped it for this thread, whose signals no longer use it. No
                // handler runs here.
                unsafe {
                    libc::sigaltstack(&none, null_mut());
                    libc::munmap(memory, SIGNAL_STACK_BYTES);
                }
            }
        }
    }

    /// Installs the handler of each signal, once.
    fn listen() {
        for (signal, before) in SIGNALS.into_iter().zip(&BEFORE) {
            before.get_or_init(|| take(signal));
        }
    }

    /// Installs the handler. Returns the previous action.
    fn take(signal: c_int) -> sigaction {
        let mut before = MaybeUninit::<sigaction>::zeroed();
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_fault;
        // SAFETY: zeros are a valid action. The handler has the signature that SA_SIGINFO requires.
        // It accesses only the faulting thread's state, and `BEFORE`, which is empty for a fault
        // before this call ends.
        unsafe {
            let mut action = MaybeUninit::<sigaction>::zeroed().assume_init();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(signal, &action, before.as_mut_ptr());
            before.assume_init()
        }
    }

    extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        // SAFETY: the system's kernel passes both, and both live for the time of the call.
        let is_ours = unsafe { end_coroutine(&*info, &mut *context.cast::<ucontext_t>()) };
        if !is_ours {
            // SAFETY: the arguments are those of the handler.
            unsafe { pass_on(signal, info, context) };
        }
    }

    /// True if the fault is a kernel thread's. The thread then continues where its coroutine ends.
    ///
    /// # Safety
    /// The signal's handler calls it, with its own `info` and `context`.
    unsafe fn end_coroutine(info: &siginfo_t, context: &mut ucontext_t) -> bool {
        // SAFETY: a block that is set is alive, because this is its OS thread, executing the block.
        // The reference is not kept.
        let Some(block) = (unsafe { CURRENT.get().as_ref() }) else { return false };
        // A process sent the signal, so it is not a fault.
        if info.si_code <= 0 {
            return false;
        }
        let traps = &*block.traps;
        let stack_pointer = stack_pointer(context);
        let Ok(coroutines) = traps.coroutines.try_borrow() else { return false };
        let Some(trap) = coroutines.iter().find(|trap| trap.handler.stack_ptr_in_bounds(stack_pointer)) else {
            return false;
        };
        // SAFETY: both signals come with an address, except for addresses that can hold no memory
        // at all (SI_KERNEL).
        let address = (info.si_code != libc::SI_KERNEL).then(|| unsafe { info.si_addr() } as usize);
        // SAFETY: the call queries a constant of the system.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let overflow = address.is_some_and(|address| address.wrapping_sub(trap.limit) < page);
        traps.note.set(Some(if overflow { Note::StackOverflow } else { Note::NoMemory(address) }));
        // SAFETY: the stack pointer is in the coroutine, which is alive, because it runs. Outside
        // its stack a kernel thread writes the launch's outputs and shared memory, which are
        // discarded after a fault. It also writes the block's own cells, by whole words. The
        // scheduler reads them only to determine which thread ran.
        let registers = unsafe { trap.handler.setup_trap_handler(|| ()) };
        go_on(context, registers);
        true
    }

    #[cfg(target_arch = "x86_64")]
    fn stack_pointer(context: &ucontext_t) -> usize {
        context.uc_mcontext.gregs[libc::REG_RSP as usize] as usize
    }

    #[cfg(target_arch = "x86_64")]
    fn go_on(context: &mut ucontext_t, registers: corosensei::trap::TrapHandlerRegs) {
        let corosensei::trap::TrapHandlerRegs { rip, rsp, rbp, rdi, rsi } = registers;
        let all = &mut context.uc_mcontext.gregs;
        for (register, value) in [
            (libc::REG_RIP, rip),
            (libc::REG_RSP, rsp),
            (libc::REG_RBP, rbp),
            (libc::REG_RDI, rdi),
            (libc::REG_RSI, rsi),
        ] {
            all[register as usize] = value as i64;
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn stack_pointer(context: &ucontext_t) -> usize {
        context.uc_mcontext.sp as usize
    }

    #[cfg(target_arch = "aarch64")]
    fn go_on(context: &mut ucontext_t, registers: corosensei::trap::TrapHandlerRegs) {
        let corosensei::trap::TrapHandlerRegs { pc, sp, x0, x1, x29, lr } = registers;
        let all = &mut context.uc_mcontext;
        (all.pc, all.sp) = (pc, sp);
        for (register, value) in [(0, x0), (1, x1), (29, x29), (30, lr)] {
            all.regs[register] = value;
        }
    }

    /// Performs the process's previous action for the signal.
    ///
    /// # Safety
    /// The signal's handler calls it, with its own arguments.
    unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        let before = SIGNALS.iter().zip(&BEFORE).find(|&(&of, _)| of == signal).and_then(|(_, before)| before.get());
        let before = before.filter(|before| ![libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction));
        // SAFETY: a previous handler has the signature that its flags name. If there is none, the
        // default action ends the process: when the fault recurs, or now, if a process sent the
        // signal.
        unsafe {
            match before {
                Some(before) if before.sa_flags & libc::SA_SIGINFO != 0 => {
                    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                        std::mem::transmute(before.sa_sigaction);
                    handler(signal, info, context);
                }
                Some(before) => {
                    let handler: extern "C" fn(c_int) = std::mem::transmute(before.sa_sigaction);
                    handler(signal);
                }
                None => {
                    libc::signal(signal, libc::SIG_DFL);
                    if (*info).si_code <= 0 {
                        libc::raise(signal);
                    }
                }
            }
        }
    }
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
pub(super) use signal::SignalStack;

/// A stub for other systems, where a fault ends the process.
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
pub(super) struct SignalStack;

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
impl SignalStack {
    pub(super) fn new() -> Self {
        Self
    }
}

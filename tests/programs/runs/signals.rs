//! Signals that end a training program: at once before the first update, and with a checkpoint
//! after it.

use super::*;

/// Starts a rank that waits for missing ranks, and has made no update.
fn waiting(mut command: Command) -> Child {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    for (name, value) in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 2), ("MASTER_PORT", port)] {
        command.env(name, value.to_string());
    }
    command.env("MASTER_ADDR", "127.0.0.1").env("STEPSCOPE_GROUP_SECRET", "the secret of this test");
    command.args(["--deadline", "3600"]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn early_signal_ends_run_at_once() {
    for name in ["-INT", "-TERM", "-HUP"] {
        for program in ["gpt", "crossasset"] {
            let place = Workplace::new();
            let child = waiting(if program == "gpt" { place.gpt("") } else { place.crossasset("") });
            wait_for(&place.path("out/.stepscope-lock"));
            sleep(Duration::from_millis(100));
            signal(&child, name);
            let begun = Instant::now();
            let output = ends_within(child, SOON);
            let printed = text(&output.stderr);
            assert_eq!(output.status.code(), Some(130), "{program} {name}: {printed}");
            assert!(
                printed.contains(&format!("SIG{}: stopped before the first update; nothing was saved", &name[1..])),
                "{printed}"
            );
            assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
            assert!(!place.path("out").exists(), "the empty folder must be removed");
        }
    }
}

/// The run writes a message at once, and a checkpoint from which a resumed run reaches the weights
/// of an uninterrupted one.
#[test]
fn each_signal_saves_a_language_model() {
    let place = Workplace::new();
    let run = "--updates 40 --checkpoint-every 1 --evaluate-every 1000";
    assert!(within(&mut place.gpt(&format!("{run} --out straight")), LATE).status.success());
    let expected = report(&place.path("straight"))["weights_sha256"].clone();
    for name in ["-INT", "-TERM", "-HUP"] {
        let child =
            place.gpt(&format!("{run} --overwrite")).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let checkpoint = place.path("out/model.safetensors");
        let _ = fs::remove_file(&checkpoint);
        wait_for(&checkpoint);
        signal(&child, name);
        let output = ends_within(child, LATE);
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{name}: {printed}");
        assert!(
            printed.contains(&format!("SIG{}: stopping after the current update, with a checkpoint", &name[1..])),
            "{printed}"
        );
        Checkpoint::load(&checkpoint).unwrap();
        let resumed = within(&mut place.gpt(&format!("{run} --resume {}", checkpoint.display())), LATE);
        assert!(resumed.status.success(), "{}", text(&resumed.stderr));
        assert_eq!(report(&place.path("out"))["weights_sha256"], expected, "{name}");
    }
}

/// The second signal ends the run, even if its standard error, where it acknowledges the first, is
/// not read.
#[test]
fn second_signal_ends_run_at_once() {
    let place = Workplace::new();
    // It does not finish an evaluation of many minutes.
    let child = place.gpt("--updates 100000").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for(&place.path("out/.stepscope-lock"));
    sleep(Duration::from_millis(500));
    signal(&child, "-INT");
    let _ = Command::new("kill").args(["-INT", &child.id().to_string()]).stderr(Stdio::null()).status().unwrap();
    assert_eq!(ends_within(child, SOON).status.code(), Some(130));
}

/// Starts a program as `nohup` does.
#[test]
fn ignored_hangup_ends_nothing() {
    let place = Workplace::new();
    let inner = place.gpt("--updates 20 --checkpoint-every 1");
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(inner.get_program()).args(inner.get_args());
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for(&place.path("out/.stepscope-lock"));
    signal(&child, "-HUP");
    let output = ends_within(child, LATE);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

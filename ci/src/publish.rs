//! Everything that must hold before a release, except the upload.
//!
//! A person tags and uploads the release: `cargo publish --workspace --exclude stepscope-ui`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;
use tempfile::TempDir;

use crate::tools::{
    EVERY_FEATURE, Outcome, Tools, at, output, plant, read, refused, run, say, scratch, selected, stdout, write,
};

/// The published packages, dependencies first.
const PUBLISHED: [&str; 12] = [
    "stepscope-cuda-std-macros",
    "stepscope-cuda-std",
    "stepscope-kernels",
    "stepscope-cuda-builder",
    "stepscope-core",
    "stepscope-group",
    "stepscope-train-macros",
    "stepscope-train",
    "stepscope-check",
    "stepscope-models",
    "stepscope-chat",
    "stepscope",
];
const LIMIT_BYTES: u64 = 2_000_000;

type Part = (&'static str, fn(&Release) -> Outcome);

const PARTS: [Part; 7] = [
    // The contents and the manifest of each package, and the changelog.
    ("contents", contents),
    // cargo deny: licenses, bans, sources (deny.toml); advisories if their repository is reachable.
    ("licenses", licenses),
    // Each pair of features, and all, compile without a warning.
    ("features", features),
    // The stated rust-version compiles all features.
    ("msrv", msrv),
    // The version allows all changes since the last tag (or the previous version).
    ("semver", semver),
    // `cargo publish --dry-run` in order. Then, without network and in an empty folder, each
    // unpacked package builds, and the README's program trains with the packed files, and builds
    // with `cuda`.
    ("packages", packages),
    // The documentation as docs.rs builds it: nightly, without network and CUDA.
    ("docs", docs),
];

/// Runs the named parts, or all.
pub(crate) fn publish(arguments: &[String]) -> Outcome {
    let parts = selected(&PARTS, arguments)?;
    let tools = Tools::install(&["cuda_stub"])?;
    let folder = tools.target().join("publish");
    let release = Release { tools: tools.with("CARGO_TARGET_DIR", &folder), folder, work: scratch()? };
    for (name, part) in parts {
        let started = Instant::now();
        say(name);
        part(&release)?;
        println!("{name}: {} s", started.elapsed().as_secs());
    }
    Ok(())
}

struct Release {
    tools: Tools,
    /// cargo's target folder.
    folder: PathBuf,
    work: TempDir,
}

impl Release {
    /// Writes a package into the temporary folder, and returns the tools for it.
    fn plant(&self, name: &str, manifest: &str, source: &str) -> Outcome<Tools> {
        let folder = self.work.path().join(name);
        plant(&folder, name, &format!("version = \"0.1.0\"\n{manifest}"), source)?;
        Ok(self.tools.within(&folder).with("CARGO_TARGET_DIR", self.work.path().join("target")))
    }

    fn version(&self) -> Outcome<String> {
        let metadata = metadata(&self.tools)?;
        let package =
            metadata.into_iter().find(|package| package["name"] == "stepscope").ok_or("no package stepscope")?;
        Ok(package["version"].as_str().unwrap_or_default().to_owned())
    }

    /// Returns the unpacked folder of a published package in the registry.
    fn unpacked(&self, package: &str) -> Outcome<PathBuf> {
        Ok(self.work.path().join(format!("registry/{package}-{}", self.version()?)))
    }
}

/// Returns the packages of a workspace that are published.
fn metadata(tools: &Tools) -> Outcome<Vec<Value>> {
    let text = stdout(&mut tools.command("cargo metadata --quiet --no-deps --format-version 1"))?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| format!("cargo metadata: {error}"))?;
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    Ok(packages
        .into_iter()
        .filter(|package| package["publish"].as_array().is_none_or(|list| !list.is_empty()))
        .collect())
}

fn contents(release: &Release) -> Outcome {
    let whole = "description = \"d\"\ndocumentation = \"https://docs.rs\"\nreadme = \"README.md\"\nrust-version = \"1.90\"\n\
        keywords = [\"k\"]\ncategories = [\"science\"]";
    let planted = release.plant("whole", whole, "")?;
    let folder = release.work.path().join("whole");
    for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        write(folder.join(file), "")?;
    }
    described(&planted)?;
    write(folder.join("benches/a.json"), "")?;
    write(folder.join("src/large"), " ".repeat(LIMIT_BYTES as usize + 1))?;
    for reason in ["no build needs: benches/a.json", "at most 2000000"] {
        refused(reason, reason, described(&planted))?;
    }
    let bare = release.plant("bare", "", "")?;
    for field in ["description", "rust_version", "keywords", "LICENSE-MIT"] {
        refused(&format!("a package without {field}"), &format!("no {field}"), described(&bare))?;
    }
    println!("{}", described(&release.tools)?.join("\n"));
    let (version, text) = (release.version()?, read("CHANGELOG.md")?);
    let heading = |text: &str| {
        let heading = text.lines().find_map(|line| line.strip_prefix("## ")).unwrap_or_default().to_owned();
        if heading.split(' ').next() == Some(&version) {
            Ok(())
        } else {
            Err(format!("the changelog begins with {heading}, not {version}"))
        }
    };
    refused("a changelog without this version", "begins with", heading("## Unreleased\n"))?;
    heading(&text)
}

/// Checks the metadata, files and sizes of the published packages, and returns a line for each.
fn described(tools: &Tools) -> Outcome<Vec<String>> {
    let (mut faults, mut sizes) = (Vec::new(), Vec::new());
    for package in metadata(tools)? {
        let name = package["name"].as_str().unwrap_or_default();
        let folder =
            Path::new(package["manifest_path"].as_str().unwrap_or_default()).parent().unwrap_or(Path::new("."));
        let list = stdout(&mut tools.command(format!("cargo package --list --allow-dirty --quiet --package {name}")))?;
        let files: Vec<&str> = list.lines().collect();
        // Packing creates some files, which do not exist in the folder.
        let size: u64 = files.iter().filter_map(|file| Some(fs::metadata(folder.join(file)).ok()?.len())).sum();
        let fields = ["description", "documentation", "license", "readme", "rust_version"];
        let mut missing: Vec<&str> = fields.into_iter().filter(|field| package[field].is_null()).collect();
        let is_list = |field: &str| package[field].as_array().is_some_and(|list| (1..=5).contains(&list.len()));
        missing.extend(["keywords", "categories"].iter().filter(|field| !is_list(field)));
        missing.extend(["LICENSE-APACHE", "LICENSE-MIT"].iter().filter(|file| !files.contains(file)));
        faults.extend(missing.iter().map(|what| format!("{name}: no {what}")));
        let folders = ["tests", "benches", "examples", "ci", "target"];
        let unwanted = files.iter().find(|file| folders.contains(&file.split('/').next().unwrap_or_default()));
        faults.extend(unwanted.map(|file| format!("{name}: a file that no build needs: {file}")));
        if size > LIMIT_BYTES {
            faults.push(format!("{name}: {size} bytes, at most {LIMIT_BYTES} are wanted"));
        }
        sizes.push(format!("{name}: {} files, {size} bytes", files.len()));
    }
    if faults.is_empty() { Ok(sizes) } else { Err(faults.join("\n")) }
}

fn licenses(release: &Release) -> Outcome {
    let tools = Tools::install(&["release_tool cargo-deny"])?;
    let config = at("deny.toml", fs::canonicalize("deny.toml"))?;
    let denied = |folder: &Path| {
        let mut command = tools.within(folder).command("cargo deny --log-level error --config");
        output(command.arg(&config).args(["check", "--hide-inclusion-graph", "licenses", "bans", "sources"]))
    };
    release.plant("gpl", "[dependencies]\nlibm = \"*\"", "")?;
    let folder = release.work.path().join("gpl");
    let manifest = read(folder.join("Cargo.toml"))?.replace("\"MIT\"", "\"GPL-3.0-only\"");
    write(folder.join("Cargo.toml"), manifest)?;
    for (what, reason) in [("a license that is not allowed", "GPL-3.0"), ("a dependency of any version", "wildcard")] {
        refused(what, reason, denied(&folder))?;
    }
    denied(Path::new("."))?;
    let advisories = "https://github.com/RustSec/advisory-db";
    if output(
        release.tools.with("GIT_TERMINAL_PROMPT", "0").command("timeout 30 git ls-remote").args([advisories, "HEAD"]),
    )
    .is_err()
    {
        println!("NOT CHECKED: advisories. {advisories} cannot be reached from here; run this part where it can");
        return Ok(());
    }
    tools.run("cargo deny --log-level error check --hide-inclusion-graph advisories")
}

fn features(release: &Release) -> Outcome {
    let planted = release.plant(
        "features",
        "[features]\na = []\nb = []",
        "#[cfg(all(feature = \"a\", feature = \"b\"))]\ncompile_error!(\"both\");\n",
    )?;
    refused("features that compile separately but not together", "both", combined(&planted))?;
    let stub = Tools::install(&["cuda_stub", "no_kernels"])?;
    combined(&stub.with("CARGO_TARGET_DIR", &release.folder))
}

/// Lints each published package without features, with each, with each pair, and with all.
fn combined(tools: &Tools) -> Outcome {
    for package in metadata(tools)? {
        let name = package["name"].as_str().unwrap_or_default();
        let features = package["features"].as_object().into_iter().flatten().map(|(name, _)| name.as_str());
        let features: Vec<&str> = features.filter(|feature| *feature != "default").collect();
        let mut sets = vec![String::new(), features.join(",")];
        sets.extend(features.iter().map(|feature| (*feature).to_owned()));
        sets.extend(
            features
                .iter()
                .zip(1..)
                .flat_map(|(one, next)| features[next..].iter().map(move |other| format!("{one},{other}"))),
        );
        sets.sort();
        sets.dedup();
        for set in &sets {
            let with = if set.is_empty() { String::new() } else { format!("--features {set}") };
            tools.output(format!(
                "cargo clippy --quiet --lib --package {name} --no-default-features {with} -- -D warnings"
            ))?;
        }
        println!("{name}: {} sets of {} features", sets.len(), features.len());
    }
    Ok(())
}

fn msrv(release: &Release) -> Outcome {
    let newer = "pub fn f() -> u32 { std::cfg_select! { unix => 1, _ => 2 } }"; // since 1.95
    let old = release.plant("old", "rust-version = \"1.94\"", newer)?;
    refused("a crate that is newer than its rust-version", "cfg_select", compiled(&old, "1.94", ""))?;
    let version =
        metadata(&release.tools)?.first().and_then(|package| Some(package["rust_version"].as_str()?.to_owned()));
    let version = version.ok_or("the manifest states no rust-version")?;
    let tools = Tools::install(&["cuda_stub", "no_kernels"])?.with("CARGO_TARGET_DIR", &release.folder);
    compiled(&tools, &version, &format!("--workspace --exclude stepscope-ui --features {EVERY_FEATURE}"))
}

/// Compiles with the first release of a Rust version.
fn compiled(tools: &Tools, version: &str, arguments: &str) -> Outcome {
    let release = if version.matches('.').count() == 1 { format!("{version}.0") } else { version.to_owned() };
    Tools::install(&[&format!("toolchain {release}")])?;
    tools.output(format!("cargo +{release} check --quiet {arguments}"))?;
    println!("compiled by Rust {release}");
    Ok(())
}

fn semver(release: &Release) -> Outcome {
    let tools = Tools::install(&["release_tool cargo-semver-checks"])?.with("CARGO_TARGET_DIR", &release.folder);
    let work = release.work.path();
    let check = |folder: &str, baseline: &str, arguments: &str| {
        let mut command = tools.within(work.join(folder)).command("cargo semver-checks --only-explicit-features");
        output(command.arg("--baseline-root").arg(work.join(baseline)).args(arguments.split_whitespace()))
    };
    release.plant("before", "", "pub fn one() {}\npub fn two() {}")?;
    release.plant("after", "", "pub fn one() {}")?;
    let manifest = work.join("after/Cargo.toml");
    write(&manifest, read(&manifest)?.replace("\"after\"", "\"before\""))?;
    refused("a function less in the same version", "function_missing", check("after", "before", ""))?;

    let git = |line: &str| release.tools.output(format!("git {line}")).map(|text| text.trim().to_owned());
    let baseline = git("describe --tags --abbrev=0 --match v[0-9]*").or_else(|_| {
        let raised = git("log -n 1 --format=%H -G^version -- Cargo.toml")?;
        git(&format!("rev-parse {raised}^"))
            .map_err(|error| format!("{error}no tag, and no version before: run: git fetch --unshallow --tags"))
    })?;
    println!("since {baseline}");
    release.tools.copy_sources(&work.join("current"))?;
    run(release
        .tools
        .command("bash -euo pipefail -c")
        .arg("mkdir \"$2\"; git archive \"$1\" | tar -x -C \"$2\"")
        .args(["tar", &baseline])
        .arg(work.join("baseline")))?;
    // device/rust-cuda has a package of the same name, and the check accepts only one.
    for root in ["current", "baseline"] {
        let _ = fs::remove_dir_all(work.join(root).join("device/rust-cuda"));
    }
    let known = metadata(&release.tools.within(work.join("baseline")))?;
    for package in PUBLISHED {
        // The check cannot read macros. Features that the baseline lacks are only for the current
        // version.
        let features = match package {
            "stepscope-cuda-std-macros" | "stepscope-train-macros" => continue,
            "stepscope" => "--features dlpack,ndarray,nvtx --current-features check,encrypted,group,progress",
            _ => "",
        };
        if known.iter().all(|known| known["name"] != package) {
            println!("{package}: new");
            continue;
        }
        let log = check("current", "baseline", &format!("--package {package} {features}"))?;
        let lines: Vec<&str> = log
            .lines()
            .map(str::trim)
            .filter(|line| line.starts_with("Checking") || line.contains(" checks: "))
            .collect();
        println!("{package}: {}", lines.join(" "));
    }
    Ok(())
}

/// Creates a registry with the packed files and all their dependencies, and returns the tools with
/// a cargo that uses only it, without the stub driver, and without network if the system lets a
/// user do so.
fn registry(release: &Release) -> Outcome<Tools> {
    let (tools, work) = (&release.tools, release.work.path());
    let home = work.join("home");
    if !home.exists() {
        let packages = PUBLISHED.map(|package| format!("--package {package}")).join(" ");
        tools.run(format!("cargo package --quiet {packages} --no-verify --locked --allow-dirty"))?;
        run(tools
            .command("bash -euo pipefail -c")
            .arg("source ci/setup; vendor \"$1\"")
            .arg("ci/setup")
            .arg(work.join("registry")))?;
        for package in PUBLISHED {
            let file = release.folder.join(format!("package/{package}-{}.crate", release.version()?));
            run(tools.command("tar -C").arg(work.join("registry")).arg("-xzf").arg(&file))?;
            let digest = output(tools.command("sha256sum").arg(&file))?;
            let checksum =
                format!("{{\"files\":{{}},\"package\":\"{}\"}}", digest.split(' ').next().unwrap_or_default());
            write(release.unpacked(package)?.join(".cargo-checksum.json"), checksum)?;
        }
        let registry = work.join("registry").display().to_string();
        let source = "[source.crates-io]\nreplace-with = \"packed\"\n[net]\noffline = true\n[source.packed]\n";
        write(home.join("config.toml"), format!("{source}directory = \"{registry}\"\n"))?;
    }
    Ok(Tools::bare()?.with("CARGO_HOME", home).with("CARGO_TARGET_DIR", &release.folder))
}

/// Returns the command without network, if the system lets a user do so.
fn offline(tools: &Tools, line: &str) -> String {
    let is_possible = tools.output("unshare -rn true").is_ok();
    if is_possible { format!("unshare -rn {line}") } else { line.to_owned() }
}

fn packages(release: &Release) -> Outcome {
    let dry = "cargo publish --dry-run --allow-dirty";
    let planted = release.plant(
        "lacking",
        "description = \"d\"\ninclude = [\"/src\"]",
        "pub fn f() -> &'static str { include_str!(\"../other.txt\") }",
    )?;
    write(release.work.path().join("lacking/other.txt"), "")?;
    refused("a package without a file that it needs", "other.txt", planted.output(dry))?;
    release.tools.output(format!("{dry} --workspace --exclude stepscope-ui --locked"))?;
    let tools = registry(release)?;
    let work = release.work.path();
    for package in PUBLISHED {
        run(release.tools.command("cp -r").arg(release.unpacked(package)?).arg(work.join(package)))?;
        tools.within(work.join(package)).output(offline(&tools, "cargo build --quiet --locked"))?;
        println!("{package}: built in an empty folder");
    }
    let outside = work.join("outside");
    let manifest =
        format!("[features]\ncuda = [\"stepscope/cuda\"]\n[dependencies]\nstepscope = \"{}\"", release.version()?);
    plant(&outside, "outside", &manifest, "")?;
    let page = read("README.md")?;
    // The last program of the README, which trains.
    let program = page.rsplit("```rust\n").next().and_then(|rest| rest.split("```").next()).unwrap_or_default();
    write(outside.join("src/main.rs"), program)?;
    let tools = tools.within(&outside);
    tools.output(offline(&tools, "cargo run --quiet"))?;
    println!("a package that depends on the packed files: the README's program has trained on the emulator");
    let stub = release.tools.get("CUDA_PATH")?;
    let tools = tools.with("CUDA_PATH", stub).with("CUDA_LIBRARY_PATH", stub).with("STEPSCOPE_ARCHS", "sm_121");
    let build = offline(&tools, "cargo build --quiet --features cuda");
    // Without the folder's path in the kernels' package, and in a separate target folder, because
    // cargo assumes that registry files never change.
    let script = release.unpacked("stepscope-kernels")?.join("build.rs");
    let text = read(&script)?;
    write(&script, "fn main() {}\n")?;
    let elsewhere = tools.with("CARGO_TARGET_DIR", work.join("target"));
    refused(
        "packages that do not find the kernels' sources",
        "DEP_STEPSCOPE_KERNELS_ROOT is not set",
        elsewhere.output(&build),
    )?;
    write(&script, text)?;
    tools.output(&build)?;
    println!("and with feature cuda: kernels for sm_121, compiled where cargo unpacked them");
    Ok(())
}

fn docs(release: &Release) -> Outcome {
    let nightly = Tools::install(&["nightly_toolchain"])?;
    let documented = |tools: &Tools, features: &str| {
        let tools = tools.with("RUSTUP_HOME", nightly.get("RUSTUP_HOME")?);
        let tools = tools.with("DOCS_RS", "1").with("RUSTDOCFLAGS", "-D warnings --cfg docsrs");
        let line = format!("cargo {} rustdoc --quiet --offline --lib {features}", nightly.get("nightly")?);
        tools.output(offline(&tools, &line))
    };
    let planted = release.plant("docs", "", "//! See [`Nothing`].")?;
    refused("documentation with a link to nothing", "unresolved link", documented(&planted, ""))?;
    let tools = registry(release)?;
    for package in metadata(&release.tools)? {
        let name = package["name"].as_str().unwrap_or_default();
        let asked = &package["metadata"]["docs"]["rs"]["features"];
        let asked: Vec<&str> = asked.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let features = if asked.is_empty() { String::new() } else { format!("--features {}", asked.join(",")) };
        documented(&tools.within(release.unpacked(name)?), &features)?;
        println!("{name}: documented, without a warning");
    }
    Ok(())
}

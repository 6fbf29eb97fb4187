# The outputs of flake.nix for one system.
{
  self,
  pkgs,
  crane,
  rust-cuda,
}:
let
  inherit (pkgs) lib;

  # The host's compiler, which with its library source also compiles the kernels.
  rust = pkgs.rust-bin.stable."1.95.0".default.override { extensions = [ "rust-src" ]; };
  craneLib = (crane.mkLib pkgs).overrideToolchain rust;
  # The architectures of device/: the GB10 first, then those of the measurements.
  archs = [
    "sm_121"
    "sm_90"
    "sm_90a"
  ];

  cudaPackages = pkgs.cudaPackages_13_0;
  # CUDA without the driver, in the layout that cust_raw expects. The linker gets the toolkit's stub
  # of the driver.
  cuda = pkgs.runCommand "cuda-without-driver" { } ''
    mkdir -p $out/lib64
    ln -s ${cudaPackages.cudatoolkit}/include $out/include
    ln -s ${lib.getOutput "stubs" cudaPackages.cuda_cudart}/lib/stubs/libcuda.so $out/lib64/libcuda.so
  '';
  linkCuda = {
    CUDA_PATH = cuda;
    CUDA_LIBRARY_PATH = cuda;
  };

  # The driver is the host's. NixOS has it in a fixed place, and other systems in their library
  # folder, of which nothing else may be used.
  findDriver = ''
    if [ -e /run/opengl-driver/lib/libcuda.so.1 ]; then
      export LD_LIBRARY_PATH=/run/opengl-driver/lib''${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    else
      for folder in /usr/lib/${pkgs.stdenv.hostPlatform.system}-gnu /usr/lib64 /usr/lib/wsl/lib; do
        [ -e "$folder/libcuda.so.1" ] || continue
        driver=''${XDG_CACHE_HOME:-$HOME/.cache}/stepscope/driver
        mkdir -p "$driver"
        ln -sf "$folder"/libcuda.so* "$folder"/libnvidia-*.so* "$driver/"
        export LD_LIBRARY_PATH=$driver''${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        break
      done
    fi
  '';

  # Runs cargo COMMAND over the whole workspace, with every crate of Cargo.lock available.
  cargo =
    name: args:
    craneLib.mkCargoDerivation (
      {
        pname = "stepscope-${name}";
        version = (builtins.fromTOML (builtins.readFile ../Cargo.toml)).workspace.package.version;
        src = self;
        cargoArtifacts = null;
        doInstallCargoArtifacts = false;
      }
      // args
    );

  # The crates of these lock files, and of the library that -Zbuild-std compiles.
  withLibrary =
    toolchain: locks:
    craneLib.vendorMultipleCargoDeps {
      cargoLockList = locks ++ [ "${toolchain}/lib/rustlib/src/rust/library/Cargo.lock" ];
    };

  ptx = cargo "ptx" {
    cargoVendorDir = withLibrary rust [ ../Cargo.lock ];
    buildPhaseCargoCommand = ''
      cargo run --locked --package stepscope-cuda-builder --example emit_ptx -- \
        device "$out" target/cuda-builder ${toString archs}
    '';
  };
  # The names of the library's kernels.
  kernels = cargo "kernels" {
    buildPhaseCargoCommand = "cargo run --locked -- check --list > kernels.txt";
    # crane's default creates $out as a folder.
    installPhaseCommand = "cp kernels.txt $out";
  };
  withCuda = linkCuda // {
    STEPSCOPE_PTX_DIR = ptx;
    STEPSCOPE_ARCHS = lib.concatStringsSep "," archs;
  };

  programs = cargo "programs" (
    withCuda
    // {
      buildPhaseCargoCommand = "cargo build --release --locked --features cuda --bins --examples";
      installPhaseCommand = ''
        install -Dt $out/bin target/release/stepscope
        find target/release/examples -maxdepth 1 -type f -executable ! -name '*-*' -exec install -Dt $out/bin {} +
      '';
      nativeBuildInputs = [ pkgs.autoAddDriverRunpath ];
      meta.mainProgram = "stepscope";
    }
  );

  # One of the programs, with the host's driver.
  app = name: {
    type = "app";
    program = lib.getExe (
      pkgs.writeShellScriptBin name ''
        ${findDriver}
        exec ${programs}/bin/${name} "$@"
      ''
    );
  };

  rustCuda = import ./rust-cuda.nix { inherit pkgs rust-cuda cudaPackages withLibrary; };
in
{
  packages = {
    default = programs;
    inherit ptx;
    ptx-rust-cuda = cargo "ptx-rust-cuda" rustCuda.build;
    docs = cargo "docs" {
      RUSTDOCFLAGS = "-Dwarnings";
      buildPhaseCargoCommand = "cargo doc --locked --no-deps --workspace";
      installPhaseCommand = "mkdir -p $out/share && cp -r target/doc $out/share/doc";
    };
  };

  apps = lib.genAttrs [
    "crossasset"
    "stepscope"
  ] app;

  devShells = {
    default = pkgs.mkShell (
      linkCuda
      // {
        packages = [
          rust
          pkgs.llvmPackages.llvm
          cudaPackages.cudatoolkit
          pkgs.cargo-nextest
          pkgs.python3
        ];
        shellHook = findDriver;
      }
    );
    rust-cuda = pkgs.mkShell (rustCuda.environment // { packages = rustCuda.tools; });
  };

  checks = {
    lint = cargo "lint" (
      withCuda
      // {
        buildPhaseCargoCommand = ''
          cargo fmt --all --check
          cargo clippy --locked --workspace --all-targets -- -D warnings
          cargo clippy --locked --workspace --all-targets --features cuda -- -D warnings
        '';
      }
    );
    ptx = cargo "ptx-rules" {
      buildPhaseCargoCommand = ''
        cargo run --locked --package xtask -- ptx-rules ${cudaPackages.cuda_nvcc} ${kernels} ${ptx} ${toString archs}
      '';
    };
    nextest = cargo "nextest" {
      nativeBuildInputs = [ pkgs.cargo-nextest ];
      buildPhaseCargoCommand = "cargo nextest run --locked --workspace";
    };
  };
}

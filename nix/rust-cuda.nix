# device/rust-cuda: the kernels compiled with rust-cuda's own cuda_builder, its compiler, LLVM 19
# and CUDA's libNVVM.
{
  pkgs,
  rust-cuda,
  cudaPackages,
  withLibrary,
}:
let
  inherit (pkgs) lib;
  rust = pkgs.rust-bin.fromRustupToolchainFile ../device/rust-cuda/rust-toolchain.toml;
  llvm = pkgs.llvmPackages_19;
in
rec {
  tools = [
    rust
    (lib.getDev llvm.llvm)
    llvm.clang
    pkgs.pkg-config
    pkgs.cmake
    cudaPackages.cudatoolkit
    pkgs.openssl
    pkgs.libxml2
    pkgs.zlib
    pkgs.ncurses
  ];

  environment = {
    LLVM_CONFIG_19 = "${lib.getDev llvm.llvm}/bin/llvm-config";
    LLVM_LINK_SHARED = "1"; # as nixpkgs builds it
    LIBCLANG_PATH = "${lib.getLib llvm.libclang}/lib";
    CUDA_PATH = cudaPackages.cudatoolkit;
    CUDA_ROOT = cudaPackages.cudatoolkit;
    # The program that cargo xtask rust-cuda compiles with.
    STEPSCOPE_RUST_CUDA = pkgs.writeShellScript "rust-cuda" ''
      exec cargo run --release --manifest-path "$1/device/rust-cuda/Cargo.toml" -- "$2"
    '';
    LD_LIBRARY_PATH = lib.makeLibraryPath [
      llvm.llvm
      pkgs.stdenv.cc.cc
      pkgs.libxml2
      pkgs.zlib
      pkgs.ncurses
    ] + ":${cudaPackages.libnvvm}/lib:${cudaPackages.libnvvm}/lib64:${cudaPackages.cudatoolkit}/nvvm/lib64";
  };

  # Arguments of crane's mkCargoDerivation. rust-cuda is a path there. The other crates of
  # device/rust-cuda/Cargo.lock are those of its own lock file. This revision and lock file were
  # shown to give the right bits without patches (device/rust-cuda/README.md).
  build = environment // {
    nativeBuildInputs = tools;
    dontUseCmakeConfigure = true;
    cargoVendorDir = withLibrary rust [ "${rust-cuda}/Cargo.lock" ];
    postPatch = ''
      sed -i -E 's|^(cuda_\w+) = \{ git = .*|\1 = { path = "${rust-cuda}/crates/\1" }|' device/rust-cuda/Cargo.toml
    '';
    buildPhaseCargoCommand = ''
      export PATH=${rust}/bin:$PATH
      cargo run --offline --release --manifest-path device/rust-cuda/Cargo.toml -- "$out"
    '';
  };
}

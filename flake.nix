# stepscope with Nix, for aarch64-linux (GB10) and x86_64-linux.
#
#   nix run .#stepscope -- doctor           checks the GPU; the driver is the host's
#   nix run .#crossasset -- --device cuda   trains
#   nix build .#ptx                         result/sm_121.ptx and others, for STEPSCOPE_PTX_DIR
#   nix build .#ptx-rust-cuda               the same kernels, compiled by rust-cuda
#   nix develop                             Rust with its source, LLVM, CUDA 13 (no driver), nextest
#   nix flake check                         lint, the rules of the PTX, the tests on the emulator
#
# flake.lock pins the revisions known when it was written. rust-cuda is pinned by revision here, and
# `nix flake lock` adds its hash. cargo xtask flake evaluates every output against the stand-ins of
# nix/, and builds nothing. docs/platforms.md describes how to check it with the real inputs.
{
  description = "A training runtime in Rust for NVIDIA GPUs";

  inputs = {
    nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";
    rust-overlay.url = "github:oxalica/rust-overlay";
    rust-overlay.inputs.nixpkgs.follows = "nixpkgs";
    crane.url = "github:ipetkov/crane";
    # The same revision as in device/rust-cuda/Cargo.toml.
    rust-cuda.url = "github:brandonros/Rust-CUDA/103a8d56935c4e0885ff7c3d25402319df1a8e00";
    rust-cuda.flake = false;
  };

  outputs =
    {
      self,
      nixpkgs,
      rust-overlay,
      crane,
      rust-cuda,
    }:
    let
      perSystem =
        system:
        import ./nix {
          inherit self crane rust-cuda;
          pkgs = import nixpkgs {
            inherit system;
            overlays = [ rust-overlay.overlays.default ];
            config.allowUnfree = true; # CUDA
          };
        };
      systems = nixpkgs.lib.genAttrs [ "aarch64-linux" "x86_64-linux" ] perSystem;
      output = name: builtins.mapAttrs (_: outputs: outputs.${name}) systems;
    in
    {
      packages = output "packages";
      apps = output "apps";
      devShells = output "devShells";
      checks = output "checks";
    };
}

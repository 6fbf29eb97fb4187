{ system, overlays, config }:
assert config.allowUnfree;
let
  derive =
    name: attributes:
    builtins.derivation (
      builtins.removeAttrs attributes [ "meta" ] // { inherit name system; builder = "/bin/sh"; }
    );
  package = name: derive name { };
  packages = names: builtins.listToAttrs (map (name: { inherit name; value = package name; }) names);
  pkgs =
    packages [ "autoAddDriverRunpath" "cargo-nextest" "cmake" "libxml2" "ncurses" "openssl" "pkg-config" "python3" "zlib" ]
    // {
      lib = import ./lib.nix;
      inherit derive;
      stdenv = {
        hostPlatform = { inherit system; };
        cc.cc = package "gcc";
      };
      runCommand = name: attributes: script: derive name (attributes // { inherit script; });
      writeShellScript = name: script: derive name { inherit script; };
      writeShellScriptBin = name: script: derive name { inherit script; };
      mkShell = attributes: derive "shell" attributes;
      cudaPackages_13_0 = packages [ "cuda_cudart" "cuda_nvcc" "cudatoolkit" "libnvvm" ];
      llvmPackages = packages [ "llvm" ];
      llvmPackages_19 = packages [ "clang" "libclang" "llvm" ];
    };
in
builtins.foldl' (pkgs: overlay: pkgs // overlay pkgs pkgs) pkgs overlays

# A stand-in for crane in cargo xtask flake: its functions with their required arguments.
{
  outputs = _: {
    mkLib = pkgs: {
      overrideToolchain = toolchain: {
        vendorMultipleCargoDeps = { cargoLockList }: pkgs.derive "vendor-cargo-deps" { inherit cargoLockList; };
        mkCargoDerivation =
          arguments@{ pname, version, src, cargoArtifacts, buildPhaseCargoCommand, ... }:
          pkgs.derive "${pname}-${version}" (arguments // { inherit toolchain; });
      };
    };
  };
}

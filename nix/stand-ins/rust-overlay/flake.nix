# A stand-in for rust-overlay in cargo xtask flake: the used toolchains, which exist at the pinned
# revision.
{
  inputs.nixpkgs.url = "github:NixOS/nixpkgs";
  outputs = _: {
    overlays.default = final: _: {
      rust-bin = {
        stable."1.95.0".default = {
          override = { extensions }: final.derive "rust-1.95.0" { inherit extensions; };
        };
        fromRustupToolchainFile = file: final.derive (builtins.fromTOML (builtins.readFile file)).toolchain.channel { };
      };
    };
  };
}

# A stand-in for nixpkgs in cargo xtask flake: the names that the flake uses, as derivations that
# nothing builds. A name missing here is an error there. A name missing in the real nixpkgs is not
# detected.
{
  outputs = _: { lib = import ./lib.nix; };
}

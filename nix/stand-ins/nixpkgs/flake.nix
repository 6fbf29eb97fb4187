# Stands in for nixpkgs in ci/flake: the names that the flake uses, as derivations that nothing builds. A name that is not here
# is an error there, a name that nixpkgs has not is not found by it.
{
  outputs = _: { lib = import ./lib.nix; };
}

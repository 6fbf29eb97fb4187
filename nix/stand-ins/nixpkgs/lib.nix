rec {
  genAttrs = names: make: builtins.listToAttrs (map (name: { inherit name; value = make name; }) names);
  concatStringsSep = builtins.concatStringsSep;
  getOutput = output: package: package.${output} or package;
  getDev = getOutput "dev";
  getLib = getOutput "lib";
  getExe = package: "${package}/bin/${package.name}";
  makeLibraryPath = packages: concatStringsSep ":" (map (package: "${getLib package}/lib") packages);
}

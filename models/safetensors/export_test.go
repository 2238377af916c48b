package safetensors

// File is file, for tests outside the package.
var File = file

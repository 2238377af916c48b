// Command gen writes the driver's trampolines from symbols.txt: table.h with the
// names, and one tramp_GOARCH.S for each processor. Run it by `go generate` in
// the folder above.
package main

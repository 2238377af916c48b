// Package arguments reads the structs of kernels' arguments from CUDA sources, which are
// the only place where they are written down, and generates from them the Go structs of
// package cuda and the list of fields that internal/simt compares a C++ compiler's layout
// with.
//
// A struct of arguments is called NAME_args and has fields of the types that are listed in
// this package (whole numbers, float, tensor maps) and of other such structs, in any order:
// where Go would place a field elsewhere than C, or end a struct earlier, the generated one
// is padded. What a struct may not have (arrays, pointers, bit fields, conditions of the
// preprocessor) is an error.
//
// It is no compiler of C: types have the sizes that they have on every device of CUDA's and
// on 64-bit hosts.
//
//	structs, err := arguments.Read(sources)
//	err = structs[0].Check(reflect.TypeFor[attentionArgs]())
package arguments

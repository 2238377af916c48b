// Package untrusted opens files that users name, prints text that users and files give, and says where what should be
// JSON is none.
//
// Every file of a model, a policy, a hardware description, a trace or a list is opened here, so
// that none of them can block or fill the memory of the process: a test of the repository
// forbids os.Open and its like elsewhere.
//
// # What it is not
//
// It neither parses nor judges content, and it opens nothing for writing.
//
// # Invariants
//
//   - Only regular files are opened, and opening never waits: a named pipe, a device, a
//     socket or a directory is an error that says so.
//   - Every read has a limit. A file over it is an error, not a shorter file.
//   - Name, Quote and Line return one line of printable characters of bounded length, whatever
//     they are given.
//
// # Example
//
//	data, err := untrusted.ReadFile(path, 16<<20)
//	if err != nil {
//		return err // open "a\x1b[31m.json": is a named pipe; give a regular file
//	}
//	return fmt.Errorf("%s: unknown key %s", untrusted.Name(path), untrusted.Quote(key))
package untrusted

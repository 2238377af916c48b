// Package page has the page for operators: what a node is doing, at the root of the admin address. It is
// plain HTML, CSS and JavaScript without a build step, and asks nothing of other servers.
//
// index.html has the structure, page.css the looks, and the scripts are modules:
//
//   - page.js    fetches and follows what the node says, and hands it to the views
//   - source.js  requests with the key, and the stream of events
//   - views.js   draws each section from data
//
// # Invariants
//
//   - Every text that comes from the server is put in as text, never as HTML.
//   - What is said by color is also said by a letter or a word.
package page

import (
	"embed"
	"fmt"
	"mime"
	"path"
)

//go:embed index.html page.css page.js source.js views.js
var files embed.FS

// File is one file of the page.
type File struct {
	// Type is its MIME type.
	Type    string
	Content []byte
}

// Files are those of the page, by the path of their URL.
var Files = read()

func read() map[string]File {
	all := map[string]File{}
	entries, err := files.ReadDir(".")
	if err != nil {
		panic(err) // of what is built in
	}
	types := map[string]string{".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
	for _, e := range entries {
		content, err := files.ReadFile(e.Name())
		if err != nil {
			panic(err)
		}
		f := File{types[path.Ext(e.Name())], content}
		if _, _, err := mime.ParseMediaType(f.Type); err != nil {
			panic(fmt.Sprintf("page: %s has no type: %v", e.Name(), err))
		}
		url := "/page/" + e.Name()
		if e.Name() == "index.html" {
			url = "/"
		}
		all[url] = f
	}
	return all
}

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/moeserve/moeserve/configs"
)

// TestMan: each command has a page, with its flags, which formatters read without a complaint.
func TestMan(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man1")
	if _, errs, code := invoke(t, strings.NewReader(""), "man", "--dir", dir); code != 0 {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	pages := map[string]string{}
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		name := strings.ReplaceAll(cmd.CommandPath(), " ", "-") + ".1"
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		}
		pages[name] = string(text)
		for _, c := range cmd.Commands() {
			if c.IsAvailableCommand() && c.Name() != "help" {
				visit(c)
			}
		}
	}
	visit(newRoot(&streams{}))
	if len(pages) < 15 {
		t.Fatalf("%d pages", len(pages))
	}
	for _, k := range configs.For("serve") {
		if !strings.Contains(pages["moeserve-serve.1"], `\fB--`+k.Name+`\fP`) {
			t.Errorf("the page of serve has no --%s", k.Name)
		}
	}
	out, errs, code := invoke(t, strings.NewReader(""), "man", "bench", "sweep")
	if code != 0 || out != pages["moeserve-bench-sweep.1"] {
		t.Errorf("man bench sweep: exit code %d: %s%s", code, out, errs)
	}
	for want, args := range map[string][]string{"there is no command \"serv\"": {"man", "serv"}, "leave one out": {"man", "--dir", dir, "serve"}} {
		if _, errs, code := invoke(t, strings.NewReader(""), args...); code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("%v: exit code %d: %s", args, code, errs)
		}
	}
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Log("no groff: the pages are not formatted")
		return
	}
	for name := range pages {
		if out, err := exec.CommandContext(t.Context(), groff, "-Kutf8", "-man", "-Tutf8", "-z", "-wall", filepath.Join(dir, name)).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

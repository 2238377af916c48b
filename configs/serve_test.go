package configs

import (
	"fmt"
	"testing"
)

func TestServeLists(t *testing.T) {
	for _, c := range []struct {
		set  func(*Serve)
		want string
	}{
		{func(*Serve) {}, "[] {[] [*] [*]}"},
		{func(s *Serve) { s.ServedModelName = "a, org/b" }, "[a org/b] {[] [*] [*]}"},
		{func(s *Serve) { s.AllowedOrigins, s.AllowCredentials = "https://a, https://b", true }, "[] {[https://a https://b] [*] [*]}"},
		{func(s *Serve) { s.AllowedOrigins, s.AllowedHeaders = `["*"]`, "[]" }, "[] {[*] [*] []}"},
		{func(s *Serve) { s.ServedModelName = "a,,b" }, `configs: --served-model-name is "a,,b": must be a name, or different names separated by commas`},
		{func(s *Serve) { s.ServedModelName = "a,a" }, `configs: --served-model-name is "a,a": must be a name, or different names separated by commas`},
		{func(s *Serve) { s.AllowedMethods = "[1]" }, `configs: --allowed-methods is "[1]": must be a list separated by commas, or a JSON list as ["a", "b"]`},
		{func(s *Serve) { s.AllowedOrigins, s.AllowCredentials = "*", true }, "configs: --allow-credentials is true: needs --allowed-origins by name: all pages of a browser could use its cookies"},
		{func(s *Serve) { s.AllowedOrigins = "https://a, example.com" }, `configs: --allowed-origins is "https://a, example.com": names "example.com" without a scheme, which no browser sends; write it as https://example.com`},
		{func(s *Serve) { s.AllowCredentials = true }, "configs: --allow-credentials is true: needs --allowed-origins by name: all pages of a browser could use its cookies"},
	} {
		s := Defaults()
		c.set(&s.Serve)
		got := ""
		if err := s.Validate(); err != nil {
			got = err.Error()
		} else {
			names, _ := s.Serve.ModelNames()
			cors, _ := s.Serve.ParseCORS()
			got = fmt.Sprint(names, cors)
		}
		if got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
}

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A key that no client can send, or a certificate that cannot be used, ends serve at the start, with
// what is wrong and without the key.
func TestServeRefuses(t *testing.T) {
	cert, key := certificate(t)
	_, other := certificate(t)
	for _, c := range []struct {
		name, variable string
		args           []string
		want           string
	}{
		{"newline", "", []string{"--api-key", "sesame\n"}, `--api-key is "(secret)": must not have a control character, 0x0a at byte 7 of 7`},
		{"carriage return", "sesame\r", nil, "(from MOESERVE_API_KEY)"},
		{"null", "", []string{"--api-key", "se\x01same"}, "0x01 at byte 3 of 7"},
		{"delete", "", []string{"--api-key", "sesame\x7f"}, "0x7f at byte 7 of 7"},
		{"blank before", "", []string{"--api-key", " sesame"}, "must not have blanks at its start or end"},
		{"blank behind", "", []string{"--api-key", "sesame "}, "must not have blanks at its start or end"},
		{"blank", " ", nil, "must not have blanks"},
		{"empty", "", []string{"--api-key", ""}, "the API key from --api-key is empty, which would let everybody in"},
		{"no certificate", "", []string{"--ssl-keyfile", key}, "needs --ssl-certfile"},
		{"missing", "", []string{"--ssl-certfile", cert + ".none"}, "no such file"},
		{"not of the key", "", []string{"--ssl-certfile", cert, "--ssl-keyfile", other}, "cannot be used: tls: private key does not match public key; give a certificate and its private key"},
		{"swapped", "", []string{"--ssl-certfile", key, "--ssl-keyfile", cert}, "cannot be used"},
		{"without a key", "", []string{"--ssl-certfile", cert}, "cannot be used"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.variable != "" {
				t.Setenv("MOESERVE_API_KEY", c.variable)
			}
			_, logged, code := invoke(t, strings.NewReader(""), append([]string{"serve", "--port", "0"}, c.args...)...)
			if code != exitUsage || !strings.Contains(logged, c.want) || strings.Contains(logged, "same") {
				t.Errorf("exit code %d: %s\nwant %s", code, logged, c.want)
			}
		})
	}
	t.Run("empty variable", func(t *testing.T) {
		t.Setenv("MOESERVE_API_KEY", "")
		_, logged, code := invoke(t, strings.NewReader(""), "serve", "--port", "0")
		if code != exitUsage || !strings.Contains(logged, "the API key from MOESERVE_API_KEY is empty") {
			t.Errorf("exit code %d: %s", code, logged)
		}
	})
}

// certificate writes a certificate for this machine that signs itself, and its key.
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: signed}, key: {Type: "EC PRIVATE KEY", Bytes: encoded}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// With a certificate the server speaks HTTPS alone.
func TestServeTLS(t *testing.T) {
	cert, key := certificate(t)
	p := startServe(t, "--ssl-certfile", cert, "--ssl-keyfile", key)
	if !strings.HasPrefix(p.url, "https://") {
		t.Fatalf("it serves at %s", p.url)
	}
	trusted, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(trusted)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}} //nolint:gosec // the default's version
	defer client.CloseIdleConnections()
	get := func(url string) (*http.Response, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/version", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(r)
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close() //nolint:errcheck // only read from
		}
		return resp, err
	}
	if resp, err := get(p.url); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("%+v, %v", resp, err)
	}
	if resp, err := get(strings.Replace(p.url, "https", "http", 1)); err == nil && resp.StatusCode == http.StatusOK {
		t.Errorf("without encryption: %+v", resp)
	}
	bench := exec.CommandContext(t.Context(), "moeserve", "bench", "serve", "--base-url", p.url, "--num-prompts", "2", "--input-len", "4", "--output-len", "2")
	bench.Env = append(os.Environ(), "SSL_CERT_FILE="+cert)
	if out, err := bench.CombinedOutput(); err != nil {
		t.Errorf("bench serve: %v: %s", err, out)
	}
}

func TestMaxConnections(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	room := maxConnections(1<<30, 1, log) // what open files allow here
	if room < 1 || room == 1<<30 {
		t.Errorf("room for %d connections", room)
	}
	for _, c := range []struct{ setting, requests, want int }{{0, 10, 1024}, {0, 2000, 4000}, {0, 1 << 20, 1 << 14}, {7, 2000, 7}} {
		if got := maxConnections(c.setting, c.requests, log); got != min(c.want, room) {
			t.Errorf("%+v, room for %d: %d", c, room, got)
		}
	}
}

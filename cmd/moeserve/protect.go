package main

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"syscall"

	"github.com/moeserve/moeserve/configs"
	"github.com/moeserve/moeserve/untrusted"
)

// protect checks that a key is not missing by mistake, and reads the certificate; nil where none
// is given.
func (s *settings) protect() (*tls.Config, error) {
	k, _ := configs.Find("api-key")
	from := s.sources[k.Name]
	if _, set := os.LookupEnv(k.Variable()); set && from.Kind == "default" {
		from = source{Kind: "variable", Name: k.Variable()} // empty, which for other settings means not set
	}
	if s.Serve.APIKey == "" && from.Kind != "" && from.Kind != "default" {
		return nil, usagef("the API key from %s is empty, which would let everybody in; give a key, or leave it out to serve without one", from)
	}
	if s.Serve.SSLCertfile == "" {
		if s.Serve.SSLKeyfile != "" {
			return nil, usagef("--ssl-keyfile is %s: it needs --ssl-certfile, the certificate of that key", untrusted.Quote(s.Serve.SSLKeyfile))
		}
		return nil, nil
	}
	read := func(flag, path string) ([]byte, error) {
		data, err := untrusted.ReadFile(path, maxFileBytes)
		if err != nil {
			return nil, usagef("%s: %w", flag, err)
		}
		return data, nil
	}
	certificate, err := read("--ssl-certfile", s.Serve.SSLCertfile)
	if err != nil {
		return nil, err
	}
	key, keyfile := certificate, s.Serve.SSLCertfile
	if s.Serve.SSLKeyfile != "" {
		keyfile = s.Serve.SSLKeyfile
		if key, err = read("--ssl-keyfile", keyfile); err != nil {
			return nil, err
		}
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, usagef("--ssl-certfile %s and the key in %s cannot be used: %w; give a certificate and its private key in PEM, the key without a password",
			untrusted.Name(s.Serve.SSLCertfile), untrusted.Name(keyfile), err)
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}, nil
}

// scheme of the server's address.
func scheme(encryption *tls.Config) string {
	if encryption != nil {
		return "https://"
	}
	return "http://"
}

const (
	minDefault, maxDefault = 1024, 1 << 14 // of the default
	// spareFiles are open files besides connections: devices, a model's shards, logs, and a peer
	// group of GPU libraries.
	spareFiles = 256
)

// maxConnections returns the maximum number of open connections: the setting, and without one twice the
// number of requests that may be in progress. It is never more than open files allow.
func maxConnections(setting, requests int, log *slog.Logger) int {
	n := setting
	if n == 0 {
		n = min(max(minDefault, 2*requests), maxDefault)
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		log.Debug("limit of open files not known", "err", err)
		return n
	}
	room := int(min(limit.Cur, 1<<30)) - spareFiles
	if room < spareFiles {
		room = max(1, int(limit.Cur)/2)
	}
	if n <= room {
		return n
	}
	if setting > 0 {
		log.Warn("fewer connections than requested; raise the limit of open files (ulimit -n)", "connections", room, "requested", n, "open_files", fmt.Sprint(limit.Cur))
	}
	return room
}

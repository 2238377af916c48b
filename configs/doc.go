// Package configs holds data that the rest of moeserve is configured with: the
// config.json of each model preset, descriptions of machines, and the settings of
// a run with their keys, defaults and limits.
//
// It reads no files and knows neither flags nor environment; cmd/moeserve makes
// flags, MOESERVE_* variables and the keys of moeserve.yaml out of Schema.
//
//	data, ok := configs.Preset("mixtral-8x7b")
//	machine, ok := configs.Hardware("h200")
//	s := configs.Defaults()
//	s.OffloadFraction = 0.5
//	if err := s.Validate(); err != nil { … }
//
// # Invariants
//
//   - Every field of Settings has exactly one entry of Schema, of the same name.
//   - Defaults are valid.
//   - Presets are as published, in the names of their time; package models tests
//     that each counts to the right number of parameters.
//   - Every number of a machine says where it is from.
package configs

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// format is the value of --output; the zero value is a table.
type format string

// The formats.
const (
	formatTable format = "table"
	formatJSON  format = "json"
	formatYAML  format = "yaml"
)

func formats() []string { return []string{string(formatTable), string(formatJSON), string(formatYAML)} }

// String implements pflag.Value.
func (f *format) String() string {
	if *f == "" {
		return string(formatTable)
	}
	return string(*f)
}

// Set implements pflag.Value.
func (f *format) Set(text string) error {
	if !slices.Contains(formats(), text) {
		return fmt.Errorf("must be one of %s", strings.Join(formats(), ", "))
	}
	*f = format(text)
	return nil
}

// Type implements pflag.Value.
func (f *format) Type() string { return "format" }

// writeDocument writes v as JSON or YAML.
func writeDocument(w io.Writer, f format, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if f == formatYAML {
		return writeYAML(w, raw)
	}
	var b bytes.Buffer
	if err := json.Indent(&b, raw, "", "  "); err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	b.WriteByte('\n')
	_, err = w.Write(b.Bytes())
	return err
}

func writeYAML(w io.Writer, document []byte) error {
	out, err := yaml.JSONToYAML(document)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	_, err = w.Write(out)
	return err
}

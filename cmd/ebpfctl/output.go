package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"sigs.k8s.io/yaml"
)

// The values of --output.
const (
	formatTable = "table"
	formatJSON  = "json"
	formatYAML  = "yaml"
)

// writeDocument writes v as JSON or YAML.
func writeDocument(w io.Writer, format string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if format == formatYAML {
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

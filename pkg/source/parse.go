package source

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

// maxContent bounds what is read of a file: a list of 5000 full Node objects is
// about 75 MB of JSON.
const maxContent = 256 << 20

// Reasons for which a list as a whole is refused.
var (
	ErrEmpty     = errors.New("no Node in it")
	ErrKind      = errors.New("not a v1 NodeList or List of Nodes")
	ErrNameless  = errors.New("item without metadata.name")
	ErrMalformed = errors.New("neither YAML nor JSON")
)

// errMore: the YAML parser would silently read the first value alone.
var errMore = fmt.Errorf("%w: more text after the list", ErrMalformed)

// list is the part of a NodeList or List that matters here.
type list struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Items      []json.RawMessage `json:"items"`
}

// Parse reads a v1 NodeList or a v1 List of Nodes, YAML or JSON, as
// `kubectl get nodes -o yaml` prints it. The error wraps ErrEmpty, ErrKind,
// ErrNameless or ErrMalformed. An object that has a name but is otherwise
// unreadable is delivered with Malformed set, so that it hurts no other.
func Parse(content []byte) ([]plan.Node, error) {
	content = bytes.TrimSpace(content)
	if len(content) == 0 {
		return nil, fmt.Errorf("the content is empty: %w", ErrEmpty)
	}
	l, err := decodeList(content)
	if err != nil {
		return nil, err
	}
	if l.APIVersion != "v1" || (l.Kind != "NodeList" && l.Kind != "List") {
		return nil, fmt.Errorf("kind %.80q, apiVersion %.80q: %w", l.Kind, l.APIVersion, ErrKind)
	}
	if len(l.Items) == 0 {
		return nil, fmt.Errorf("the list has no items: %w", ErrEmpty)
	}
	nodes := make([]plan.Node, 0, len(l.Items))
	for i, raw := range l.Items {
		n, err := decodeItem(raw, l.Kind == "List")
		if err != nil {
			return nil, fmt.Errorf("items[%d]: %w", i, err)
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

func decodeList(content []byte) (list, error) {
	if content[0] == '{' {
		l, err := decodeJSON(content)
		if err == nil || errors.Is(err, errMore) {
			return l, err
		}
		// Not JSON: YAML's flow style begins with a brace as well.
	}
	if l, ok := splitYAML(content); ok {
		return l, nil
	}
	if err := oneDocument(content); err != nil {
		return list{}, err
	}
	asJSON, err := yaml.YAMLToJSON(content)
	if err != nil {
		return list{}, fmt.Errorf("%w: %v", ErrMalformed, oneLine(err))
	}
	return decodeJSON(asJSON)
}

func decodeJSON(content []byte) (list, error) {
	var l list
	dec := json.NewDecoder(bytes.NewReader(content))
	if err := dec.Decode(&l); err != nil {
		if _, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return list{}, fmt.Errorf("%w: %v", ErrKind, oneLine(err))
		}
		return list{}, fmt.Errorf("%w: %v", ErrMalformed, oneLine(err))
	}
	if _, err := dec.Token(); err != io.EOF {
		return list{}, errMore
	}
	return l, nil
}

// oneDocument refuses a stream of several YAML documents, of which the parser
// would silently read the first alone.
func oneDocument(content []byte) error {
	begun := false
	for line := range bytes.Lines(content) {
		line = bytes.TrimRight(line, " \t\r\n")
		marker := bytes.Equal(line, []byte("---")) || bytes.HasPrefix(line, []byte("--- "))
		if marker && begun {
			return fmt.Errorf("%w: more than one YAML document", ErrMalformed)
		}
		if marker || (len(line) > 0 && line[0] != '#' && line[0] != '%') {
			begun = true
		}
	}
	return nil
}

// object is the part of a Node that matters. Fields that may be of a wrong type
// stay raw, so that the name can be read whatever the rest looks like.
type object struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Metadata   json.RawMessage `json:"metadata"`
	Spec       json.RawMessage `json:"spec"`
	Status     json.RawMessage `json:"status"`
}

func decodeItem(raw json.RawMessage, kindNeeded bool) (plan.Node, error) {
	var o object
	if err := json.Unmarshal(raw, &o); err != nil {
		return plan.Node{}, fmt.Errorf("%w: %v", ErrKind, oneLine(err))
	}
	if kindNeeded || o.Kind != "" || o.APIVersion != "" {
		if o.Kind != "Node" || o.APIVersion != "v1" {
			return plan.Node{}, fmt.Errorf("kind %.80q, apiVersion %.80q: %w", o.Kind, o.APIVersion, ErrKind)
		}
	}
	var meta struct {
		Name string `json:"name"`
	}
	var created struct {
		CreationTimestamp string `json:"creationTimestamp"`
	}
	// What is not there stays raw nil, which is as good as an empty object.
	if err := unmarshal(o.Metadata, &meta); err != nil || meta.Name == "" {
		return plan.Node{}, ErrNameless
	}
	n := plan.Node{Name: meta.Name}
	if unmarshal(o.Metadata, &created) == nil {
		n.Created, _ = time.Parse(time.RFC3339, created.CreationTimestamp)
	}
	if err := readSpec(&n, o.Spec); err != nil {
		n.Malformed = fmt.Sprintf("spec: %v", oneLine(err))
	}
	if err := readStatus(&n, o.Status); err != nil {
		n.Malformed = fmt.Sprintf("status: %v", oneLine(err))
	}
	return n, nil
}

func readSpec(n *plan.Node, raw json.RawMessage) error {
	var spec struct {
		PodCIDR  string   `json:"podCIDR"`
		PodCIDRs []string `json:"podCIDRs"`
	}
	if err := unmarshal(raw, &spec); err != nil {
		return err
	}
	n.PodCIDRs = spec.PodCIDRs
	if len(n.PodCIDRs) == 0 && spec.PodCIDR != "" {
		n.PodCIDRs = []string{spec.PodCIDR}
	}
	return nil
}

func readStatus(n *plan.Node, raw json.RawMessage) error {
	var status struct {
		Addresses []struct {
			Type    string `json:"type"`
			Address string `json:"address"`
		} `json:"addresses"`
	}
	if err := unmarshal(raw, &status); err != nil {
		return err
	}
	for _, a := range status.Addresses {
		n.AddAddress(a.Type, a.Address)
	}
	return nil
}

func unmarshal(raw json.RawMessage, into any) error {
	if len(raw) == 0 {
		return nil
	}
	return json.Unmarshal(raw, into)
}

// oneLine keeps a parser's message fit for a log line.
func oneLine(err error) string {
	const limit = 200
	s := string(bytes.Join(bytes.Fields([]byte(err.Error())), []byte(" ")))
	if len(s) > limit {
		s = s[:limit] + "..."
	}
	return s
}

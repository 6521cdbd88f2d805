package source

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
	"github.com/ebpf-cni/ebpf-cni/pkg/service"
)

// maxContent bounds what is read of a file: a list of 5000 full Node objects is
// about 75 MB of JSON.
const maxContent = 256 << 20

// Reasons for which a list as a whole is refused.
var (
	ErrEmpty     = errors.New("no Node in it")
	ErrKind      = errors.New("not a v1 NodeList, or List of Nodes, Services, EndpointSlices and ServiceCIDRs")
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
// Services, EndpointSlices and ServiceCIDRs in a List are passed over.
func Parse(content []byte) ([]plan.Node, error) {
	c, err := parse(content, false)
	return c.nodes, err
}

// contents are the objects in a file.
type contents struct {
	nodes    []plan.Node
	services map[service.Name]service.Service
	slices   map[service.Name]service.Slice
	cidrs    map[service.Name]cidrs
}

// parse does what Parse says, and reads whatever belongs to Services as well if that is asked for.
func parse(content []byte, withServices bool) (contents, error) {
	content = bytes.TrimSpace(content)
	if len(content) == 0 {
		return contents{}, fmt.Errorf("the content is empty: %w", ErrEmpty)
	}
	l, err := decodeList(content)
	if err != nil {
		return contents{}, err
	}
	if l.APIVersion != "v1" || (l.Kind != "NodeList" && l.Kind != "List") {
		return contents{}, fmt.Errorf("kind %.80q, apiVersion %.80q: %w", l.Kind, l.APIVersion, ErrKind)
	}
	all := contents{nodes: make([]plan.Node, 0, len(l.Items))}
	var others others
	if withServices {
		others = newOthers(&all)
	}
	for i, raw := range l.Items {
		if err := all.add(raw, l.Kind == "List", others); err != nil {
			return contents{}, fmt.Errorf("items[%d]: %w", i, err)
		}
	}
	if len(all.nodes) == 0 {
		return contents{}, fmt.Errorf("the list has %d items: %w", len(l.Items), ErrEmpty)
	}
	return all, nil
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

// document is the part of an object that matters. Fields that may be of a wrong type
// stay raw, so that the name can be read whatever the rest looks like.
type document struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Metadata   json.RawMessage `json:"metadata"`
	Spec       json.RawMessage `json:"spec"`
	Status     json.RawMessage `json:"status"`
}

// add reads an item of a list. In a List it has to say what it is; in a NodeList it is a Node.
func (c *contents) add(raw json.RawMessage, mixed bool, others others) error {
	var d document
	if err := json.Unmarshal(raw, &d); err != nil {
		return fmt.Errorf("%w: %v", ErrKind, oneLine(err))
	}
	var meta struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	}
	kind := d.APIVersion + " " + d.Kind
	isNode := kind == "v1 Node" || !mixed && kind == " "
	isOther := mixed && slices.Contains(otherKinds, kind)
	if !isNode && !isOther {
		return fmt.Errorf("kind %.80q, apiVersion %.80q: %w", d.Kind, d.APIVersion, ErrKind)
	}
	// What is not there stays raw nil, which is as good as an empty object.
	if err := unmarshal(d.Metadata, &meta); err != nil || meta.Name == "" {
		return ErrNameless
	}
	if isNode {
		c.nodes = append(c.nodes, readNode(meta.Name, d))
	} else if read := others[kind]; read != nil {
		read(service.Name{Namespace: meta.Namespace, Name: meta.Name}, raw)
	}
	return nil
}

func readNode(name string, d document) plan.Node {
	n := plan.Node{Name: name}
	var created struct {
		CreationTimestamp string `json:"creationTimestamp"`
	}
	if unmarshal(d.Metadata, &created) == nil {
		n.Created, _ = time.Parse(time.RFC3339, created.CreationTimestamp)
	}
	var labelled struct {
		Labels map[string]json.RawMessage `json:"labels"`
	}
	if unmarshal(d.Metadata, &labelled) == nil {
		_ = unmarshal(labelled.Labels[corev1.LabelTopologyZone], &n.Zone) // what is no text is no zone
	}
	n.Leaving = isLeaving(d)
	if err := readSpec(&n, d.Spec); err != nil {
		n.Malformed = fmt.Sprintf("spec: %v", oneLine(err))
	}
	if err := readStatus(&n, d.Status); err != nil {
		n.Malformed = fmt.Sprintf("status: %v", oneLine(err))
	}
	return n
}

// isLeaving reads what says so; where that can't be read, the Node stays.
func isLeaving(d document) bool {
	var deleted struct {
		DeletionTimestamp string `json:"deletionTimestamp"`
	}
	if unmarshal(d.Metadata, &deleted) == nil && deleted.DeletionTimestamp != "" {
		return true
	}
	var spec struct {
		Taints []corev1.Taint `json:"taints"`
	}
	return unmarshal(d.Spec, &spec) == nil && leavingTaints(spec.Taints) != nil
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

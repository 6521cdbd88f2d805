package source

import (
	"bytes"
	"maps"

	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// lean decodes of objects in protobuf only what the agent reads. Most of a Node is images and managed fields, of which a
// large cluster sends megabytes a minute; of a large EndpointSlice most is references to pods.
type lean struct{ runtime.NegotiatedSerializer }

// DecoderToVersion implements runtime.NegotiatedSerializer.
func (l lean) DecoderToVersion(d runtime.Decoder, v runtime.GroupVersioner) runtime.Decoder {
	return leanDecoder{l.NegotiatedSerializer.DecoderToVersion(d, v)}
}

type leanDecoder struct{ runtime.Decoder }

// Decode implements runtime.Decoder.
func (d leanDecoder) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	return d.Decoder.Decode(prune(data), defaults, into)
}

// message says which fields of one are kept, by their numbers in the API's generated.proto; of one with fields of its own
// only those.
type message map[protowire.Number]message

var (
	node = message{
		1: {1: nil, 6: nil, 8: nil, 9: nil, 11: keyed, 12: nil}, // metadata: name, resourceVersion, creationTimestamp, deletionTimestamp, labels, annotations
		2: {1: nil, 5: keyed, 7: nil},                           // spec: podCIDR, taints, podCIDRs
		3: {4: condition, 5: nil},                               // status: conditions, addresses
	}
	// Key and value of one label, or taint; a Node has dozens.
	keyed = message{onlyRead: nil, 1: nil, 2: nil}
	// All but lastHeartbeatTime, by which else each of a kubelet's heartbeats would be a change.
	condition = message{1: nil, 2: nil, 4: nil, 5: nil, 6: nil}

	aService = message{
		1: {1: nil, 3: nil, 6: nil, 8: nil, 12: nil}, // metadata: name, namespace, resourceVersion, creationTimestamp, annotations
		// spec: clusterIP and clusterIPs, type, externalIPs, sessionAffinity and its config, externalTrafficPolicy and internalTrafficPolicy,
		// loadBalancerSourceRanges, healthCheckNodePort
		2: {
			1: {1: nil, 2: nil, 3: nil, 5: nil}, // ports: name, protocol, port, nodePort
			3: nil, 18: nil, 4: nil, 5: nil, 7: nil, 14: nil, 11: nil, 22: nil, 9: nil, 12: nil,
		},
		3: {1: {1: {1: nil, 3: nil}}}, // status: loadBalancer: ingress: ip, ipMode
	}
	aSlice = message{
		1: {1: nil, 3: nil, 6: nil, 11: nil, 12: nil}, // metadata: name, namespace, resourceVersion, labels, annotations
		2: {1: nil, 2: nil, 6: nil, 7: nil, 8: nil},   // endpoints: addresses, conditions, nodeName, zone, hints
		3: {1: nil, 2: nil, 3: nil},                   // ports: name, protocol, port
		4: nil,                                        // addressType
	}
	aServiceCIDR = message{
		1: {1: nil, 6: nil, 12: nil}, // metadata: name, resourceVersion, annotations
		2: {1: nil},                  // spec: cidrs
	}

	// By the kinds of objects, and by the resources whose lists contain them.
	leanKinds = map[string]message{"Node": node, "Service": aService, "EndpointSlice": aSlice, "ServiceCIDR": aServiceCIDR}
	leanItems = map[string]message{"nodes": node, "services": aService, "endpointslices": aSlice, "servicecidrs": aServiceCIDR}
)

// without leaves a field out.
func (m message) without(field protowire.Number) message {
	rest := maps.Clone(m)
	delete(rest, field)
	return rest
}

// envelope is what is around an object: typeMeta, raw.
func envelope(object message) message { return message{1: nil, 2: object} }

// listed is what is around a list of them: in raw are metadata and items.
func listed(object message) message { return message{1: nil, 2: {1: nil, 2: object}} }

// onlyRead is no field's number: a message that has it begins with a key, and is kept only if that is one that is read.
const onlyRead protowire.Number = 0

// isKept says of a message's content whether any of it is kept.
func (m message) isKept(content []byte) bool {
	_, only := m[onlyRead]
	key := string(first(content, 1))
	return !only || key == corev1.LabelTopologyZone || key == leavingTaint
}

// protobufMagic is what the API's protobuf begins with; a runtime.Unknown follows.
var protobufMagic = []byte("k8s\x00")

func cutMagic(data []byte) (unknown []byte, ok bool) { return bytes.CutPrefix(data, protobufMagic) }

// kindOf is the kind of the object that a runtime.Unknown contains.
func kindOf(unknown []byte) []byte { return first(first(unknown, 1), 2) } // typeMeta: kind

// prune leaves out of an encoded object what nobody reads. What is none that is read stays as it is.
func prune(data []byte) []byte {
	unknown, ok := cutMagic(data)
	object, known := leanKinds[string(kindOf(unknown))]
	if !ok || !known {
		return data
	}
	return envelope(object).appendTo(bytes.Clone(protobufMagic), unknown)
}

// first is the first field with that number, of bytes; empty: there is none.
func first(data []byte, number protowire.Number) []byte {
	for len(data) > 0 {
		n, kind, tag := protowire.ConsumeTag(data)
		size := protowire.ConsumeFieldValue(n, kind, data[max(tag, 0):])
		if tag < 0 || size < 0 {
			return nil
		}
		if n == number && kind == protowire.BytesType {
			content, _ := protowire.ConsumeBytes(data[tag:])
			return content
		}
		data = data[tag+size:]
	}
	return nil
}

// appendTo appends what is kept of a message. What can't be read is kept, for the decoder to refuse.
func (m message) appendTo(to, data []byte) []byte {
	for len(data) > 0 {
		number, kind, tag := protowire.ConsumeTag(data)
		size := protowire.ConsumeFieldValue(number, kind, data[max(tag, 0):])
		if tag < 0 || size < 0 {
			return append(to, data...)
		}
		switch inner, kept := m[number]; {
		case kept && (inner == nil || kind != protowire.BytesType):
			to = append(to, data[:tag+size]...)
		case kept:
			if content, _ := protowire.ConsumeBytes(data[tag:]); inner.isKept(content) {
				to = protowire.AppendTag(to, number, kind)
				to = protowire.AppendBytes(to, inner.appendTo(nil, content))
			}
		}
		data = data[tag+size:]
	}
	return to
}

// The examples of the schema view: [name, prompt, schema].

const object = (properties) => ({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });

const person = object({
  name: { type: "string", maxLength: 40 },
  age: { type: "integer", minimum: 0, maximum: 130 },
  languages: { type: "array", items: { enum: ["English", "French", "German", "Hindi"] }, minItems: 1, maxItems: 3 },
});
const feeling = object({
  sentiment: { enum: ["positive", "neutral", "negative"] },
  score: { type: "integer", minimum: 1, maximum: 5 },
  reason: { type: "string", maxLength: 80 },
});
const date = object({
  date: { type: "string", format: "date" },
  place: { type: "string", pattern: "^[A-Z][a-z]{1,20}$" },
  people: { type: "integer", minimum: 1, maximum: 12 },
});
const order = object({
  customer: object({ name: { type: "string", maxLength: 24 }, city: { enum: ["Lisbon", "Oslo", "Rome"] } }),
  lines: {
    type: "array",
    minItems: 1,
    maxItems: 2,
    items: object({ what: { type: "string", maxLength: 24 }, count: { type: "integer", minimum: 1, maximum: 9 } }),
  },
  gift: { type: "boolean" },
});
export const EXAMPLES = [
  ["A person", "Invent a person who works on a ship. Answer in JSON.", person],
  ["A review", "Review: 'The soup was cold, but the waiter was kind.' What is its sentiment? Answer in JSON.", feeling],
  ["A booking", "Book a table for four in Lisbon on the third of May 2027. Answer in JSON.", date],
  ["An order", "Invent an order at a bookshop: who buys, and what. Answer in JSON.", order],
];

// The examples of the schema view: [name, prompt, schema].

const person = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 40 },
    age: { type: "integer", minimum: 0, maximum: 130 },
    languages: { type: "array", items: { enum: ["English", "French", "German", "Hindi"] }, minItems: 1, maxItems: 3 },
  },
  required: ["name", "age", "languages"],
  additionalProperties: false,
};
const feeling = {
  type: "object",
  properties: {
    sentiment: { enum: ["positive", "neutral", "negative"] },
    score: { type: "integer", minimum: 1, maximum: 5 },
    reason: { type: "string", maxLength: 80 },
  },
  required: ["sentiment", "score", "reason"],
  additionalProperties: false,
};
const date = {
  type: "object",
  properties: {
    date: { type: "string", format: "date" },
    place: { type: "string", pattern: "^[A-Z][a-z]{1,20}$" },
    people: { type: "integer", minimum: 1, maximum: 12 },
  },
  required: ["date", "place", "people"],
  additionalProperties: false,
};
const order = {
  type: "object",
  properties: {
    customer: { type: "object", properties: { name: { type: "string", maxLength: 24 }, city: { enum: ["Lisbon", "Oslo", "Rome"] } }, required: ["name", "city"], additionalProperties: false },
    lines: {
      type: "array",
      minItems: 1,
      maxItems: 2,
      items: { type: "object", properties: { what: { type: "string", maxLength: 24 }, count: { type: "integer", minimum: 1, maximum: 9 } }, required: ["what", "count"], additionalProperties: false },
    },
    gift: { type: "boolean" },
  },
  required: ["customer", "lines", "gift"],
  additionalProperties: false,
};
export const EXAMPLES = [
  ["A person", "Invent a person who works on a ship. Answer in JSON.", person],  ["An order", "Invent an order at a bookshop: who buys, and what. Answer in JSON.", order],
];
